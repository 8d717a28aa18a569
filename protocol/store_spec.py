"""Where a run's adapters lie and how long they stay, as the run's file says it."""

from __future__ import annotations

from protocol.spec import Count, CountOrZero, NonNegative, Positive, Spec


class StoreSpec(Spec):
    """Where adapters lie."""

    url: str
    """``file:///…`` (a shared directory), ``hf://buckets/<namespace>/<bucket>[/prefix]`` (the Hub) or ``nats://``
    (the run's broker)."""
    timeout_s: Positive = 120.0
    keep_updates: Count = 8
    """Newest updates of each learner that stay in the store. Older ones stay as long as a live peer, a group
    within ``max_staleness`` or ``recover`` may need them."""
    keep_states: Count = 2
    """Newest optimizer states of each learner that stay."""
    keep_exports: CountOrZero = 0
    """Newest exports of each learner that stay; 0 keeps all."""
    grace_s: NonNegative = 3600.0
    """Nothing younger than this is ever deleted."""
