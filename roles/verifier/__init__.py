"""The verifier: checks the structure of groups and scores their rollouts."""
