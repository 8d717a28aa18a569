"""What a peer does: sample, verify, learn."""
