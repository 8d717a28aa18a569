"""A whole swarm with its real roles and its real model in one process, under virtual time."""
