"""The witness: tells a restored broker of a peer's head that was committed before its disk was lost.

The bucket alone cannot always tell whether an upload was committed (``roles/policy/chains.py``). Who saw its
head at the broker knows. Heads are signed, so anybody may hand one on; it is stored as its author commits it,
with every group that its update lists, or not at all.
"""

from __future__ import annotations

from protocol.errors import BusError, StoreError
from protocol.messages import Head
from protocol.ports import AdapterStore, Write
from protocol.subjects import GENESIS_KEY, Bucket, head_key
from roles.learner.done import done_again
from roles.learner.update_entry import head_frame
from roles.policy.chains import outcomes
from roles.ring import Ring


class Witness:
    """What one learner knows of its peers' commits."""

    def __init__(self, ring: Ring, store: AdapterStore) -> None:
        self._ring = ring
        self._store = store

    async def testify(self, lost: list[Head]) -> None:
        """Say of each of these heads that it was committed; what fails is tried when this is called again."""
        for head in lost:
            try:
                if await self._ring.bus.get(Bucket.RUN, GENESIS_KEY) is not None:
                    await self._restore(head)
            except (BusError, StoreError) as exc:
                why = str(exc) or type(exc).__name__
                self._ring.log.warning("head_unrestored", learner=head.learner, count=head.count, error=why)

    async def _restore(self, head: Head) -> None:
        manifest = await self._store.manifest(head.path)
        frame = await head_frame(self._store, head.path)
        key = head_key(head.learner)
        stands = await self._ring.bus.get(Bucket.POLICY, key)
        writes, taken = await done_again(self._ring.bus, head.learner, head.count, outcomes(manifest))
        if taken:
            return  # somebody consumed them since: this head cannot be true any more
        expected = stands.revision if stands is not None else 0
        await self._ring.bus.commit(Bucket.POLICY, [*writes, Write(key, frame, expected=expected)])
        await self._ring.tell("head_witnessed", learner=head.learner, count=head.count)
