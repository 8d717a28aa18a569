"""Tests of jobs on the Hub, against a stand-in that the real client talks to."""
