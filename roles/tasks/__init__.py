"""Prompts and answers: one file a kind of task set."""
