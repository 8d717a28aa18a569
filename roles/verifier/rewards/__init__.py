"""Rewards: one file a kind of reward."""
