"""The one exception tree: what can go wrong, named by what the caller should do about it.

A third party's exception is translated into one of these in the adapter that imports the third
party, and nowhere else. A peer's fault is not an exception but data: see ``reasons.py``.
"""

from __future__ import annotations


def one_line(text: str, chars_max: int = 200) -> str:
    """``text`` for a log or a terminal: printable, on one line, cut. It may quote a stranger."""
    line = "".join(char if char.isprintable() else " " for char in text[: chars_max + 1])
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


class GrpoError(Exception):
    """Anything this project raises on purpose."""


class OperatorError(GrpoError, ValueError):
    """A person must change something; the text says what is wrong and what to do, in one line."""


class DecodeError(GrpoError):
    """Bytes that are not a message of this protocol version; never retried. The text is one short line."""

    def __init__(self, text: str) -> None:
        """Keep the printable beginning of ``text``."""
        super().__init__(one_line(text))


class MessageTooLarge(GrpoError):
    """A message beyond the broker's limit; raised before anything is sent."""


class FencedError(GrpoError):
    """Another process writes under the same learner id; this one must stop."""


class EngineError(GrpoError):
    """An engine could not sample; the task may succeed elsewhere."""


# --- the broker ---------------------------------------------------------------------------------


class BusError(GrpoError):
    """A broker operation did not succeed."""


class BrokerAbsent(BusError):
    """No broker answered; nothing happened; trying again is safe."""


class BackPressure(BusError):
    """The queue is full; wait and try again."""


class UnknownOutcome(BusError):
    """The request may or may not have taken effect; read back before doing anything else."""


class WrongRevision(BusError):
    """A compare-and-set lost: somebody wrote the key first; nothing was stored."""


# --- the adapter store --------------------------------------------------------------------------


class StoreError(GrpoError):
    """An adapter store operation failed."""


class StoreNotFound(StoreError):
    """Nothing complete lies under that path (no manifest yet, or never published)."""


class StoreCorrupt(StoreError):
    """What lies under that path is not what its manifest promises."""


class StoreConflict(StoreError):
    """Other bytes were already published under that path; a path is written once."""


class StoreUnavailable(StoreError):
    """The store did not answer in time or failed for the moment; trying again is safe."""


class StoreDenied(StoreError):
    """The store refused for good: no such bucket, or no right to it; do not retry."""
