"""Recomputations of tokens that a sampler drew (``bench.ratio``)."""
