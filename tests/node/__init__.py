"""Tests of how a peer runs."""
