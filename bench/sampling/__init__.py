"""Ways to sample the same groups, each in a process of its own (``bench.sampler``)."""
