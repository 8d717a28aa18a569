"""The verifier role."""
