"""Who speaks: an Ed25519 nkey per node, and signing and verifying with it.

The seed is an ordinary NATS user nkey, so the same secret logs a node in to a broker and signs what
it says. Public keys are written as nkeys text (``U...``, 56 characters).

What is signed is a tag and the sha256 of the data. The tag begins with a byte that no UTF-8 text
contains, so a broker, whose log-in challenge is a text, can never obtain a signature over a message.
"""

from __future__ import annotations

import base64
import hashlib
import os

import nacl.exceptions
import nacl.signing
import nkeys

from protocol.errors import OperatorError

PUBLIC_KEY_CHARS = 56
SIGNATURE_BYTES = 64
_TAG = b"\xffgrpo-node signs\x01"
_KEY_BYTES = 35
"""A public key inside its text: prefix, 32 bytes, 2 bytes of checksum."""


class Identity:
    """A node's name and key pair."""

    def __init__(self, node: str, seed: bytes) -> None:
        """Take a node name and an nkeys seed; raises OperatorError on a seed that is none."""
        self.node = node
        self.seed = seed.strip()
        try:
            prefix, raw = nkeys.decode_seed(self.seed)
            if prefix != nkeys.PREFIX_BYTE_USER or nkeys.encode_seed(raw, prefix) != self.seed:
                raise ValueError("another kind of key, or a wrong checksum")
            self._pair = nkeys.from_seed(bytearray(self.seed))
        except (nkeys.NkeysError, ValueError) as exc:
            raise OperatorError(f"not a user nkey seed for node {node}; delete it to make a new one") from exc
        self.public_key: str = bytes(self._pair.public_key).decode()

    @classmethod
    def generate(cls, node: str) -> Identity:
        """Make a new random identity."""
        return cls(node, bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)))

    @classmethod
    def deterministic(cls, node: str) -> Identity:
        """Make an identity from the node name alone: for tests and simulations, never for a run."""
        raw = hashlib.sha256(node.encode()).digest()
        return cls(node, bytes(nkeys.encode_seed(raw, nkeys.PREFIX_BYTE_USER)))

    def sign(self, data: bytes) -> bytes:
        """Sign ``data``; the signature is 64 bytes."""
        return bytes(self._pair.sign(_signed_bytes(data)))


def _signed_bytes(data: bytes | memoryview) -> bytes:
    return _TAG + hashlib.sha256(data).digest()


def verify(public_key: str, data: bytes | memoryview, signature: bytes) -> bool:
    """Whether ``signature`` over ``data`` was made by the holder of ``public_key``; never raises."""
    try:
        raw = base64.b32decode(public_key)
        if len(raw) != _KEY_BYTES or raw[0] != nkeys.PREFIX_BYTE_USER:
            return False
        if nkeys.crc16(raw[:-2]) != int.from_bytes(raw[-2:], "little"):
            return False
        nacl.signing.VerifyKey(raw[1:-2]).verify(_signed_bytes(data), signature)
    except (ValueError, TypeError, nacl.exceptions.CryptoError):
        return False
    return True
