"""Why a peer's work was not used: a rejection is data with a reason, counted and reported."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """Why a verified group never changed the policy (it is committed as dropped, once)."""

    STALE = "stale"
    AHEAD = "ahead"
    UNSCORABLE = "unscorable"


class DeadReason(StrEnum):
    """Why a message left the ring for the dead-letter subject."""

    UNDECODABLE = "undecodable"
    TOO_MANY_DELIVERIES = "too_many_deliveries"
    WRONG_RUN = "wrong_run"
    BAD_STRUCTURE = "bad_structure"
    AUDIT_FAILED = "audit_failed"
    QUARANTINED = "quarantined"


class StructureFault(StrEnum):
    """What a verifier found wrong with the shape of a group, before any reward was computed."""

    PROMPT_MISMATCH = "prompt_mismatch"
    TASK_UNKNOWN = "task_unknown"
    ISSUER_UNKNOWN = "issuer_unknown"
    GROUP_TOO_SMALL = "group_too_small"
    GROUP_TOO_LARGE = "group_too_large"
    INDEX_REPEATED = "index_repeated"
    INDEX_OUT_OF_RANGE = "index_out_of_range"
    EMPTY_COMPLETION = "empty_completion"
    COMPLETION_TOO_LONG = "completion_too_long"
    LENGTHS_DIFFER = "lengths_differ"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"
    LOGPROB_NOT_FINITE = "logprob_not_finite"
    LOGPROB_POSITIVE = "logprob_positive"
    STOP_WITHOUT_EOS = "stop_without_eos"
    EOS_INSIDE = "eos_inside"
    LENGTH_WITHOUT_LIMIT = "length_without_limit"
    CLOCK_UNKNOWN = "clock_unknown"
    SAMPLER_MISMATCH = "sampler_mismatch"
    MASK_UNEXPECTED = "mask_unexpected"
    TURN_MALFORMED = "turn_malformed"
    REPLY_MALFORMED = "reply_malformed"


class Judgement(StrEnum):
    """What verifiers hold of a sampler's key; a key that nobody judged has none."""

    WARNED = "warned"
    """It malfunctions, and was told so; its groups are still used if they pass."""
    QUARANTINED = "quarantined"
    """Nothing that it signs is used."""
    LIFTED = "lifted"
    """A person looked at it and lets it work again."""


class Unscorable(StrEnum):
    """Why a reward has no value for a rollout; such a rollout leaves the group's baseline."""

    NO_ANSWER = "no_answer"
    GOLD_UNPARSEABLE = "gold_unparseable"
    REWARD_FAILED = "reward_failed"
