"""Contracts: one suite for each port, held by every adapter of it, fake and real."""
