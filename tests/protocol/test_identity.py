"""Identities: who signed what, and nothing else passes."""

from __future__ import annotations

import base64

import nkeys
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import OperatorError
from protocol.identity import PUBLIC_KEY_CHARS, SIGNATURE_BYTES, Identity, _signed_bytes, verify
from tests.build import an_identity

QUICK = settings(max_examples=60, deadline=None)
ME = an_identity()


@QUICK
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_a_signature_holds_for_its_data_and_key_only(data: bytes, other: bytes):
    signature = ME.sign(data)
    assert len(signature) == SIGNATURE_BYTES
    assert verify(ME.public_key, data, signature)
    assert verify(ME.public_key, memoryview(data), signature)
    assert verify(ME.public_key, other, signature) == (other == data)
    assert not verify(an_identity("other").public_key, data, signature)


@QUICK
@given(st.text(), st.binary(max_size=100), st.binary(max_size=100))
def test_verifying_nonsense_says_no_and_never_raises(public_key: str, data: bytes, signature: bytes):
    assert not verify(public_key, data, signature)
    assert not verify(ME.public_key, data, signature)


def test_the_same_seed_is_the_same_node_and_a_new_one_is_not():
    assert Identity("a", ME.seed).public_key == ME.public_key
    assert Identity("a", ME.seed + b"\n").public_key == ME.public_key
    assert Identity.generate("a").public_key != Identity.generate("a").public_key
    assert len(ME.public_key) == PUBLIC_KEY_CHARS
    assert ME.public_key.startswith("U")


def test_identities_for_tests_differ_by_the_whole_name():
    assert an_identity("x" * 40 + "1").public_key != an_identity("x" * 40 + "2").public_key


@pytest.mark.parametrize(
    "seed",
    [
        b"",
        b"x",
        b"not a seed at all",
        bytes(58),
        ME.public_key.encode(),
        ME.seed[:-1],
        ME.seed + b"A",
        ME.seed[:20] + (b"A" if ME.seed[20:21] != b"A" else b"B") + ME.seed[21:],
        bytes(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT)),
    ],
    ids=["empty", "short", "words", "zeros", "public", "cut", "long", "mistyped", "account"],
)
def test_a_seed_that_is_none_is_the_operators_mistake_in_one_line(seed: bytes):
    with pytest.raises(OperatorError, match="node-7") as caught:
        Identity("node-7", seed)
    assert "\n" not in str(caught.value)
    assert not seed or seed.decode() not in str(caught.value)


def test_a_key_has_one_spelling():
    raw = base64.b32decode(ME.public_key)
    signature = ME.sign(b"data")
    assert verify(base64.b32encode(raw).decode(), b"data", signature)
    other_checksum = base64.b32encode(raw[:-1] + bytes([raw[-1] ^ 1])).decode()
    for spelling in (other_checksum, ME.public_key.lower(), ME.public_key + "=", " " + ME.public_key):
        assert not verify(spelling, b"data", signature)


def test_a_key_of_another_kind_is_refused():
    pair = nkeys.from_seed(bytearray(nkeys.encode_seed(bytes(32), nkeys.PREFIX_BYTE_ACCOUNT)))
    assert not verify(bytes(pair.public_key).decode(), b"data", pair.sign(b"data"))


def test_a_log_in_challenge_cannot_be_turned_into_a_signed_message():
    pair = nkeys.from_seed(bytearray(ME.seed))
    message = b"a message that the broker would like to have signed"
    assert not verify(ME.public_key, message, pair.sign(message))
    with pytest.raises(UnicodeDecodeError):
        _signed_bytes(message).decode()
