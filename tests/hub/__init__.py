"""A stand-in for the Hub that the stock client talks to over real HTTP, and the store's tests against it."""
