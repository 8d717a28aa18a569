"""TRL beside us: what runs in an environment of its own, in which TRL is installed."""
