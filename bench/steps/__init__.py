"""One optimizer step of the learner and of its peers, each in a process of its own (``bench.learner``)."""
