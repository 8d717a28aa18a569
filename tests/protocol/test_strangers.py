"""Whatever a stranger sends, and signs, is a message or a DecodeError: no crash, no cost, no confusion."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import limits
from protocol.clock import GENESIS
from protocol.codec import MAGIC, decode, encode
from protocol.errors import DecodeError
from protocol.message import Message
from protocol.messages import Head
from tests.build import RUN, a_group, a_rollout, a_task, a_verified_group, an_identity
from tests.protocol import strategies
from tests.protocol.forge import STRANGER, a_frame, altered, an_event, as_json, parts

ME = an_identity()
QUICK = settings(max_examples=80, deadline=None)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just({"$": 0}),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@QUICK
@given(st.binary(max_size=300), st.sampled_from([b"", MAGIC, MAGIC + b"\x01", MAGIC + b"\x01" + bytes(8)]))
def test_arbitrary_bytes_give_only_a_decode_error(data: bytes, start: bytes):
    with pytest.raises(DecodeError):
        decode(start + data)


@QUICK
@given(strategies.messages, st.data())
def test_any_json_in_any_field_gives_a_message_or_a_decode_error(message: Message, data: st.DataObject):
    envelope, body, raw = parts(encode(message, ME))
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(json_values)
    _decodes_or_refuses(a_frame(envelope["kind"], as_json(body), envelope["arrays"], raw))


@QUICK
@given(json_values, json_values)
def test_any_json_as_envelope_or_body_gives_only_a_decode_error(envelope: object, body: object):
    with pytest.raises(DecodeError):
        decode(a_frame(envelope=as_json(envelope)))
    with pytest.raises(DecodeError):
        decode(a_frame("Task", as_json(body)))


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"fields":{"a":', b"[{}, "])
def test_deeply_nested_json_is_refused(opening: bytes):
    deep = (opening * limits.BODY_BYTES_MAX)[: limits.ENVELOPE_BYTES_MAX // 2]
    for frame in (a_frame(body=deep), a_frame(envelope=deep)):
        with pytest.raises(DecodeError):
            decode(frame)


@pytest.mark.parametrize(
    "frame",
    [
        MAGIC + b"\x01" + b"\xff" * 8 + bytes(64),
        MAGIC + b"\x01" + b"\xff\xff\xff\x7f" + b"\x00" * 4 + bytes(64),
        a_frame("Task", b"{}", [["<i4", limits.FRAME_BYTES_MAX]]),
        a_frame("Task", b"{}", [["<i4", 1 << 62]]),
        a_frame("Task", b"{}", [["<i4", limits.FRAME_BYTES_MAX]] * limits.ARRAYS_MAX),
    ],
    ids=["both", "envelope", "array", "array beyond 64 bits", "arrays"],
)
def test_a_length_that_is_only_claimed_allocates_nothing(frame: bytes):
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode(frame)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 << 20


def test_naming_one_array_many_times_allocates_nothing():
    rollout = {"index": 0, "token_ids": {"$": 1}, "sampler_logprobs": {"$": 1}, "finish": "stop"}
    body = parts(encode(a_group(), ME))[1] | {"rollouts": [rollout] * limits.GROUP_SIZE_MAX}
    frame = a_frame("RolloutGroup", as_json(body), [["|u1", 0], ["|u1", 1 << 20]], bytes(1 << 20))
    tracemalloc.start()
    with pytest.raises(DecodeError):
        decode(frame)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 << 20


@pytest.mark.parametrize(
    "reference",
    [
        {"$": 1},
        {"$": -1},
        {"$": True},
        {"$": 0.0},
        {"$": "0"},
        {"$": None},
        {"$": 0, "x": 0},
        {},
        [1, 2],
        0,
        None,
    ],
)
def test_only_a_reference_to_the_next_array_stands_for_an_array(reference: object):
    with pytest.raises(DecodeError, match="prompt_token_ids"):
        decode(altered(a_task(), prompt_token_ids=reference))


def test_an_array_may_be_used_once_and_in_order_only():
    rollout = parts(encode(a_group(), ME))[1]["rollouts"][0]
    for first, second in ((1, 1), (2, 1), (1, 3)):
        swapped = rollout | {"token_ids": {"$": first}, "sampler_logprobs": {"$": second}}
        with pytest.raises(DecodeError):
            decode(altered(a_group(rollouts=(a_rollout(),)), rollouts=[swapped]))


def test_an_array_that_no_field_uses_is_refused():
    with pytest.raises(DecodeError, match="1 arrays too many"):
        decode(a_frame("Event", as_json(an_event().model_dump()), [["<i4", 2]], bytes(8)))


@pytest.mark.parametrize("dtype", ["<f4", "|u1", "<i8", ">i4", "|O", "<U4", "i4", "", None, 4, ["<i4"]])
def test_an_array_of_another_type_is_refused(dtype: object):
    envelope, body, data = parts(encode(a_task(), ME))
    with pytest.raises(DecodeError):
        decode(a_frame("Task", as_json(body), [[dtype, envelope["arrays"][0][1]]], data))


@pytest.mark.parametrize(
    "arrays", [None, 5, "ab", {"<i4": 4}, [5], [["<i4"]], [["<i4", -4]], [["<i4", 4.0]], [["<i4", True]]]
)
def test_a_malformed_description_of_arrays_is_refused(arrays: object):
    _, body, data = parts(encode(a_task(), ME))
    envelope = {"kind": "Task", "signer": STRANGER.public_key, "arrays": arrays}
    with pytest.raises(DecodeError):
        decode(a_frame(envelope=as_json(envelope), body=as_json(body), data=data))


@pytest.mark.parametrize(
    "kind", ["Rollout", "Message", "task", "", None, ["Task"], {"Task": 1}, "A" * 10_000]
)
def test_an_unknown_kind_is_refused(kind: object):
    envelope = {"kind": kind, "signer": STRANGER.public_key, "arrays": []}
    with pytest.raises(DecodeError):
        decode(a_frame(envelope=as_json(envelope)))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_protocol_version_is_refused(version: int):
    with pytest.raises(DecodeError, match="protocol version 1"):
        decode(a_frame("Event", as_json(an_event().model_dump()), version=version))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (a_task(), {"answer": "42"}),
        (a_task(), {"row": "0"}),
        (a_task(), {"row": True}),
        (a_task(), {"row": 0.0}),
        (a_task(), {"row": -1}),
        (a_task(), {"row": 1 << 53}),
        (a_task(), {"row": 10**4000}),
        (a_task(), {"seed": 1 << 63}),
        (a_task(), {"group_size": 0}),
        (a_task(), {"group_size": limits.GROUP_SIZE_MAX + 1}),
        (a_task(), {"pinned": 1}),
        (a_task(), {"deadline_s": float("nan")}),
        (a_task(), {"deadline_s": float("inf")}),
        (a_task(), {"deadline_s": "1"}),
        (a_task(), {"run": "a.b"}),
        (a_task(), {"run": "a\n"}),
        (a_task(), {"run": "a" * (limits.NAME_MAX + 1)}),
        (a_task(), {"group_id": "a..b"}),
        (a_task(), {"group_id": "a."}),
        (a_task(), {"group_id": "a.*"}),
        (a_task(), {"group_id": "a" * 97}),
        (a_task(), {"clock": {"a": True}}),
        (a_task(), {"clock": {"a": 1.0}}),
        (a_task(), {"clock": {"a": -1}}),
        (a_task(), {"clock": {"a": 1 << 60}}),
        (a_task(), {"clock": {"A": 1}}),
        (a_task(), {"clock": [["a", 1]]}),
        (a_task(), {"clock": {f"a{i}": 1 for i in range(limits.LEARNERS_MAX + 1)}}),
        (a_group(), {"rollouts": []}),
        (a_group(), {"rollouts": {}}),
        (a_group(), {"generation_s": -1.0}),
        (a_verified_group(), {"verdicts": [{"index": 0, "reward": float("nan")}]}),
        (a_verified_group(), {"verdicts": [{"index": 0, "reward": float("inf")}]}),
        (a_verified_group(), {"verdicts": [{"index": 0, "reward": True}]}),
        (a_verified_group(), {"verdicts": [{"index": 0, "reward": 1.0, "scores": {"a": float("nan")}}]}),
        (a_verified_group(), {"verdicts": [{"index": 0, "reward": 1.0}] * (limits.GROUP_SIZE_MAX + 1)}),
        (an_event(), {"fields": {"a": float("nan")}}),
        (an_event(), {"fields": {"a": 10**400}}),
        (an_event(), {"fields": {"a": [1]}}),
        (an_event(), {"at": float("inf")}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_value_outside_its_field_is_refused(message: Message, changes: dict[str, object]):
    with pytest.raises(DecodeError, match="not a valid"):
        decode(altered(message, **changes))


@pytest.mark.parametrize(
    "path", ["/etc", "../x", "a/../b", "a//b", "a/", ".hidden", "a/.b", "a\\b", "a\x00", "a" * 401]
)
def test_a_head_cannot_name_a_path_outside_the_store(path: str):
    head = Head(run=RUN, learner="a", count=0, clock=GENESIS, weight=0.0, path="", policy_digest="", nonce="")
    assert decode(altered(head)).message == head
    with pytest.raises(DecodeError, match="path"):
        decode(altered(head, path=path))


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"'])
def test_text_that_is_not_unicode_is_refused(text: bytes):
    body = as_json(an_event().model_dump()).replace(b'"step_done"', text)
    with pytest.raises(DecodeError):
        decode(a_frame("Event", body))


@QUICK
@given(st.text(max_size=3000))
def test_what_a_stranger_wrote_reaches_a_log_as_one_short_line(text: str):
    body = as_json(an_event().model_dump() | {text: 1, "fields": {text: []}})
    for frame in (a_frame("Event", body), a_frame(f"\x1b[2J\n{text[:20]}")):
        with pytest.raises(DecodeError) as caught:
            decode(frame)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) <= 200


def _decodes_or_refuses(frame: bytes) -> None:
    try:
        decode(frame)
    except DecodeError:
        return
