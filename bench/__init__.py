"""What we measure: one file a question, each run as ``python -m bench.NAME [--json]``."""
