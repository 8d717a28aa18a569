"""The codec brings back what was said, and nothing but DecodeError from what was not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from protocol import limits
from protocol.codec import decode, decode_as, encode
from protocol.errors import DecodeError, MessageTooLarge
from protocol.message import Message
from protocol.messages import Event, FinishReason, Rollout, RolloutGroup, Task, Verdict, VerifiedGroup
from tests.build import RUN, a_group, a_rollout, a_task, a_verified_group, an_identity
from tests.protocol import strategies
from tests.protocol.forge import STRANGER, a_frame, altered, an_event, as_json, parts

ME = an_identity()
QUICK = settings(max_examples=80, deadline=None)


# --- what is said is heard ----------------------------------------------------------------------


@QUICK
@given(strategies.messages)
def test_every_message_comes_back_as_it_was(message: Message):
    frame = encode(message, ME)
    signed = decode(frame)
    assert signed.message == message
    assert hash(signed.message) == hash(message)
    assert type(signed.message) is type(message)
    assert (signed.signer, signed.frame) == (ME.public_key, frame)


@QUICK
@given(strategies.events)
def test_telemetry_values_keep_their_types_and_signs(event: Event):
    back = decode_as(encode(event, ME), Event)
    assert [(key, repr(value)) for key, value in back.fields.items()] == [
        (key, repr(value)) for key, value in event.fields.items()
    ]


@QUICK
@given(strategies.messages)
def test_a_message_has_one_encoding(message: Message):
    frame = encode(message, ME)
    assert encode(message, ME) == frame
    assert encode(decode(frame).message, ME) == frame


def test_arrays_keep_every_bit_even_of_numbers_that_are_none():
    bits = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x80000000, 0x00000001], "<u4")
    rollout = a_rollout(token_ids=[0] * 5, sampler_logprobs=bits.view("<f4"))
    back = decode_as(encode(a_group(rollouts=(rollout,)), ME), RolloutGroup)
    assert back.rollouts[0].sampler_logprobs.view("<u4").tolist() == bits.tolist()


def test_a_rollout_without_a_mask_is_written_as_before_there_were_masks():
    plain = encode(a_group(), ME)
    assert b"loss_mask" not in plain
    masked = a_rollout(loss_mask=[1, 0, 1])
    back = decode_as(encode(a_group(rollouts=(masked, a_rollout(index=1))), ME), RolloutGroup)
    assert back.rollouts == (masked, a_rollout(index=1))
    assert [rollout.sampled.tolist() for rollout in back.rollouts] == [[True, False, True], [True] * 3]


def test_arrays_are_read_only_and_not_copied():
    frame = encode(a_task(prompt_token_ids=range(1000)), ME)
    prompt = decode_as(frame, Task).prompt_token_ids
    assert not prompt.flags.writeable
    assert np.shares_memory(prompt, np.frombuffer(frame, np.uint8))


def test_a_message_does_not_change_with_the_array_it_was_made_from():
    ids = np.array([1, 2, 3], "<i4")
    task = a_task(prompt_token_ids=ids)
    ids[0] = 9
    assert task.prompt_token_ids.tolist() == [1, 2, 3]


def test_the_frames_inside_a_verified_group_still_carry_their_authors():
    verified = decode_as(encode(a_verified_group(), ME), VerifiedGroup)
    group = decode(verified.group.tobytes())
    assert group.signer == an_identity("sampler-1").public_key
    task = decode(group.expect(RolloutGroup).task.tobytes())
    assert (task.signer, task.message) == (ME.public_key, a_task())


def test_a_dictionary_that_looks_like_an_array_reference_is_a_dictionary():
    event = Event(run=RUN, node="a", role="r", name="n", at=0.0, fields={"$": 0})
    assert decode(encode(event, ME)).message == event
    group = a_verified_group().model_copy(
        update={"verdicts": (Verdict(index=0, reward=1.0, scores={"$": 0.0}),)}
    )
    assert decode(encode(group, ME)).message == group


def test_telemetry_that_is_not_finite_is_sent_as_unknown():
    event = an_event(ratio=float("nan"), reward=float("-inf"), loss=np.float32("inf"), step=3)
    assert event.fields == {"ratio": None, "reward": None, "loss": None, "step": 3}
    assert decode(encode(event, ME)).message == event


def test_text_that_utf8_cannot_write_does_not_stop_its_author():
    verdict = Verdict(index=0, reward=None, note="bad \udcff byte")
    group = a_verified_group().model_copy(update={"verdicts": (verdict,)})
    assert decode_as(encode(group, ME), VerifiedGroup).verdicts[0].note == "bad ? byte"


# --- signatures ---------------------------------------------------------------------------------


def test_every_flipped_bit_is_noticed():
    frame = encode(a_task(), ME)
    for position in range(len(frame) * 8):
        flipped = bytearray(frame)
        flipped[position // 8] ^= 1 << position % 8
        with pytest.raises(DecodeError):
            decode(bytes(flipped))


def test_every_truncation_and_every_addition_is_noticed():
    frame = encode(a_task(), ME)
    for length in range(len(frame)):
        with pytest.raises(DecodeError):
            decode(frame[:length])
    for extra in (b"\x00", frame, frame[-64:]):
        with pytest.raises(DecodeError):
            decode(frame + extra)


def test_a_frame_signed_anew_by_somebody_else_names_somebody_else():
    frame = altered(a_task())
    assert decode(frame).message == a_task()
    assert decode(frame).signer == STRANGER.public_key != ME.public_key


def test_nobody_can_put_another_name_under_a_signature():
    frame = encode(a_task(), ME)
    renamed = frame.replace(ME.public_key.encode(), STRANGER.public_key.encode())
    with pytest.raises(DecodeError, match="signature"):
        decode(renamed)


@pytest.mark.parametrize("signer", ["", "x", "U" * 56, "é" * 10, None, 5, ["a"], {"a": 1}])
def test_a_signer_that_is_no_key_is_refused(signer: object):
    envelope, body, data = parts(encode(a_task(), ME))
    with pytest.raises(DecodeError):
        decode(a_frame(envelope=as_json(envelope | {"signer": signer}), body=as_json(body), data=data))


def test_a_message_of_another_kind_is_refused_where_one_is_expected():
    with pytest.raises(DecodeError, match="expected a Task, got a Event"):
        decode_as(encode(an_event(), ME), Task)


# --- limits -------------------------------------------------------------------------------------


def test_what_exceeds_a_limit_is_not_sent():
    blob = np.zeros(limits.FRAME_BYTES_MAX, np.uint8)
    with pytest.raises(MessageTooLarge, match="limit"):
        encode(a_group().model_copy(update={"task": blob}), ME)
    with pytest.raises(MessageTooLarge, match="body"):
        encode(an_event(text="x" * limits.BODY_BYTES_MAX), ME)


def test_what_exceeds_a_limit_is_not_read():
    with pytest.raises(DecodeError, match="a frame of"):
        decode(bytes(limits.FRAME_BYTES_MAX + 1))
    for frame in (
        a_frame(body=b" " * (limits.BODY_BYTES_MAX + 1)),
        a_frame(envelope=b" " * (limits.ENVELOPE_BYTES_MAX + 1)),
    ):
        with pytest.raises(DecodeError, match="do not fit"):
            decode(frame)
    with pytest.raises(DecodeError, match="arrays"):
        decode(a_frame(arrays=[["<i4", 0]] * (limits.ARRAYS_MAX + 1)))


def test_the_largest_group_fits_its_limits():
    rollouts = tuple(
        Rollout(index=i, token_ids=[1], sampler_logprobs=[0.0], finish=FinishReason.LENGTH)
        for i in range(256)
    )
    assert decode_as(encode(a_group(rollouts=rollouts), ME), RolloutGroup).rollouts == rollouts


@pytest.mark.parametrize(
    "value", [[[1]], 3, None, "12", [True], [1.5], [1 << 31], [-(1 << 31) - 1], [1 << 70], ["1"]]
)
def test_only_numbers_in_a_row_that_fit_make_an_array(value: object):
    with pytest.raises(ValueError, match="prompt_token_ids"):
        a_task(prompt_token_ids=value)


def test_an_array_longer_than_any_engine_takes_is_refused():
    with pytest.raises(ValueError, match="the limit is"):
        a_task(prompt_token_ids=np.zeros(limits.ARRAY_NUMBERS_MAX + 1, "<i4"))
