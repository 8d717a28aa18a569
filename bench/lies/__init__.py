"""Samplers that lie, each in one way, and a place to make what they send: for the audit's bench and tests."""
