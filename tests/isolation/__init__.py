"""What strangers can do at a real broker, and what they cannot."""
