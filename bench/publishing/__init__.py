"""Parts of ``bench.publish``."""
