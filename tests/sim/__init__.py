"""The swarm on one thread under virtual time: real roles, in-memory ports."""
