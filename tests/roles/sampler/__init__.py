"""Tests of roles/sampler."""
