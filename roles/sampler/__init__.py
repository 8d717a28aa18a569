"""The sampler: takes tasks, returns groups of rollouts."""
