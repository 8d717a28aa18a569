"""Where updates lie in the store, and which entries there are one (pure).

A bucket is open to people: what lies among the updates under another kind of name is not ours, and is
neither read nor deleted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAMED = re.compile(r"[^/]+/updates/([^/]+)/([1-9][0-9]{0,15})-[0-9a-z]*")


def updates_of(run: str, learner: str) -> str:
    """Directory of a learner's updates."""
    return f"{run}/updates/{learner}"


def named_update(path: str) -> tuple[str, int] | None:
    """Learner and count that ``<run>/updates/<learner>/<count>-<digest>`` names; None for another path."""
    named = _NAMED.fullmatch(path)
    return (named[1], int(named[2])) if named else None


def counts_by_path(paths: Iterable[str]) -> dict[str, int]:
    """The updates among ``paths`` with the count that each names."""
    return {path: named[1] for path in paths if (named := named_update(path))}
