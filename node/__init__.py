"""How a peer runs: processes, broker, stores, settings and the command line."""
