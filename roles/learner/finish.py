"""The end of a run: marked in the bucket and at the broker, once and for good."""

from __future__ import annotations

import json
from contextlib import suppress

from protocol.errors import StoreConflict
from protocol.manifest import EntryKind, Manifest
from protocol.ports import AdapterStore
from protocol.subjects import FINISHED_KEY, Bucket
from roles.ring import Ring


def finished_path(run: str) -> str:
    """Store path of the mark, from which ``recover`` knows that a run has ended."""
    return f"{run}/finished"


async def finish_run(ring: Ring, store: AdapterStore, version: float) -> None:
    """Tell everybody, those included who come after a loss of the broker's disk."""
    files = {"finished.json": json.dumps({"version": version}).encode()}
    manifest = Manifest(
        path=finished_path(ring.spec.name),
        kind=EntryKind.RUN,
        run=ring.spec.name,
        author=ring.identity.node,
        files=Manifest.describe(files),
    )
    with suppress(StoreConflict):  # a peer ended it first
        await ring.persist(lambda: store.publish(manifest.signed(ring.identity), files), patient=True)
    await ring.persist(lambda: ring.bus.put(Bucket.RUN, FINISHED_KEY, b"1"))
    await ring.tell("run_finished", version=version)
