"""An update's entry in the store: the cumulative change, and the head that will announce it.

The signed head lies beside the update, so that the bucket alone can restore what the broker held.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from protocol.codec import encode
from protocol.errors import StoreCorrupt
from protocol.identity import Identity
from protocol.manifest import EntryKind, Manifest
from protocol.messages import Head
from protocol.ports import AdapterStore
from roles.learner.register import Published
from roles.policy.chains import PREVIOUS
from roles.policy.compose import UPDATE_FILE
from roles.policy.peft_export import factors_bytes

HEAD_FILE = "head.bin"
"""The head's signed frame, exactly as it is committed."""

NONCE = "nonce"
"""Key in an update's manifest: the nonce of its head. No two uploads have the same path."""

GENESIS_DIGEST = "genesis"
"""Key in an update's manifest: digest of the genesis that it stands on."""


def update_entry(
    published: Published,
    head: Head,
    identity: Identity,
    *,
    trained: Sequence[str],
    dropped: Mapping[str, str],
    previous: str,
    genesis: str,
) -> tuple[Manifest, dict[str, bytes], Head]:
    """Manifest and files of an update, and ``head`` with the entry's path and the policy's digest in it.

    ``dropped`` holds what was consumed without changing the policy since the previous update, which is at
    ``previous`` (empty for the first). ``genesis`` is the digest of genesis.
    """
    files = {UPDATE_FILE: factors_bytes(published.update, published.dtype)}
    policy_digest = published.digest
    unnamed = Manifest(
        path=f"{head.run}/updates/{head.learner}/{head.count}",
        kind=EntryKind.UPDATE,
        run=head.run,
        author=head.learner,
        clock=published.clock,
        count=head.count,
        weight=published.own_weight,
        version=published.version,
        step_norm=published.step_norm,
        policy_digest=policy_digest,
        groups=tuple(trained),
        dropped=dict(dropped),
        extra={NONCE: head.nonce, GENESIS_DIGEST: genesis} | ({PREVIOUS: previous} if previous else {}),
        files=Manifest.describe(files),
    )
    digest = hashlib.sha256(unnamed.canonical()).hexdigest()[:12]
    head = head.model_copy(update={"path": f"{unnamed.path}-{digest}", "policy_digest": policy_digest})
    files[HEAD_FILE] = encode(head, identity)
    named = unnamed.model_copy(update={"path": head.path, "files": Manifest.describe(files)})
    return named.signed(identity), files, head


async def head_frame(store: AdapterStore, path: str) -> bytes:
    """The frame of an update's head, as its author signed it. Raises StoreError: StoreCorrupt for an entry
    that no learner made, for it has none."""
    manifest = await store.manifest(path)
    if HEAD_FILE not in {file.name for file in manifest.files}:
        raise StoreCorrupt(f"{path}: an update without its {HEAD_FILE}")
    return (await store.fetch(path) / HEAD_FILE).read_bytes()
