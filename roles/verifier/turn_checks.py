"""Are the turns of a rollout what they claim to be? Part of the structure checks, pure.

A mask decides what is trained on and audited, so it must not be able to lie unseen:

- tokens of a tool called the policy's: the policy's turn ends with EOS and nothing of it follows, so they
  stand behind an EOS inside a turn;
- tokens of the policy called a tool's or a user's, to keep them from audits: between two turns stand the
  replies to the calls of the first, or what a simulated user says to one without calls, in the frame of the
  chat template, and no token in them ends or begins a turn.

What a tool or a user said is not checked: they may give another answer each time.
"""

from __future__ import annotations

from protocol.messages import Rollout
from protocol.reasons import StructureFault
from roles.turns.dialogue import Dialogue
from roles.turns.spans import Span, spans_of

Fault = tuple[StructureFault, str]


def mask_fault(rollout: Rollout, dialogue: Dialogue | None) -> Fault | None:
    """Whether the mask is one: of the run, of the right length, of the right numbers."""
    mask = rollout.loss_mask
    if mask is None:
        return None
    if dialogue is None:
        return StructureFault.MASK_UNEXPECTED, "a loss mask in a run without turns"
    if len(mask) != len(rollout.token_ids):
        return StructureFault.LENGTHS_DIFFER, f"{len(rollout.token_ids)} tokens, a mask of {len(mask)}"
    if not mask[0] or not mask[-1]:
        return StructureFault.TURN_MALFORMED, "a rollout begins and ends with a turn of the policy"
    if int(mask.max()) > 1:
        return StructureFault.TURN_MALFORMED, f"{int(mask.max())} in a mask of 0 and 1"
    if rollout.sampler_logprobs[mask == 0].any():
        return StructureFault.TURN_MALFORMED, "a log-probability of a token that was not sampled"
    return None


def turns_fault(rollout: Rollout, dialogue: Dialogue, eos_ids: frozenset[int]) -> Fault | None:
    """Whether what stands between two turns of a rollout with a sound mask belongs there."""
    spans = spans_of(rollout.sampled)
    turns = (len(spans) + 1) // 2
    if turns > dialogue.turns_max:
        return StructureFault.TURN_MALFORMED, f"{turns} turns of {dialogue.turns_max}"
    said = 0
    for turn, given in zip(spans[:-1:2], spans[1::2], strict=True):
        last = int(rollout.token_ids[turn.end - 1])
        if last not in eos_ids:
            return (
                StructureFault.TURN_MALFORMED,
                f"the turn before position {turn.end} ends with token {last}",
            )
        calls = dialogue.calls_in(rollout.token_ids[turn.tokens])
        said += not calls
        if fault := _given_fault(rollout, given, dialogue, len(calls)):
            return fault
    if dialogue.user and said > dialogue.user.messages_max:
        return StructureFault.TURN_MALFORMED, f"{said} messages of the user, of {dialogue.user.messages_max}"
    return None


def ends_of_turns(rollout: Rollout) -> list[int]:
    """Where the turns before the last one end: the places inside a completion where EOS stands."""
    return [span.end - 1 for span in spans_of(rollout.sampled)[:-1] if span.sampled]


def _given_fault(rollout: Rollout, given: Span, dialogue: Dialogue, calls: int) -> Fault | None:
    """Whether what follows a turn with so many ``calls`` is their replies, or else the user's."""
    ids = rollout.token_ids[given.tokens]
    where = f"in the chat template's frame at {given.begin} to {given.end}"
    if calls:
        missing = dialogue.replies_in(ids, calls) is None
        return (StructureFault.REPLY_MALFORMED, f"no {calls} replies {where}") if missing else None
    if dialogue.user is None:
        return StructureFault.REPLY_MALFORMED, f"a reply at position {given.begin} that nothing called for"
    if dialogue.user_in(ids) is None:
        return StructureFault.REPLY_MALFORMED, f"no message of the user {where}"
    return None
