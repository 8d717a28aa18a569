"""The learner: turns verified groups into updates of the policy."""
