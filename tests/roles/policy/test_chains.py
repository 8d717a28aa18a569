"""Which uploads were committed: told by manifests alone, never two that share a group."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from protocol.clock import VectorClock
from protocol.manifest import EntryKind, Manifest
from roles.policy.chains import PREVIOUS, Chains, committed_chains, outcomes


def an_upload(
    author: str, count: int, *groups: str, previous: str = "", name: str = "", signer: str = "", **clock: int
) -> Manifest:
    """``a`` 3 named ``x`` lies at ``test/updates/a/3-x``; it follows ``a`` 2 unless ``previous`` is given."""
    before = previous or (f"test/updates/{author}/{count - 1}-" if count > 1 else "")
    return Manifest(
        path=f"test/updates/{author}/{count}-{name}",
        kind=EntryKind.UPDATE,
        run="test",
        author=author,
        clock=VectorClock.of({**clock, author: count}),
        count=count,
        groups=groups,
        extra={PREVIOUS: before} if before else {},
        files=(),
        signer=signer or f"key of {author}",
    )


def names(chains: Chains) -> dict[str, list[str]]:
    return {author: [m.path.rpartition("/")[2] for m in found] for author, found in chains.updates.items()}


def test_a_chain_is_followed_as_far_back_as_the_manifests_reach():
    uploads = [an_upload("a", n, f"g.{n}") for n in (3, 4, 5)] + [an_upload("b", 1, "g.9")]
    for order in itertools.permutations(uploads):
        chains = committed_chains(order)
        assert names(chains) == {"a": ["3-", "4-", "5-"], "b": ["1-"]}
        assert {group: m.count for group, (_, m) in chains.consumed.items()} == {
            "g.3": 3,
            "g.4": 4,
            "g.5": 5,
            "g.9": 1,
        }


def test_an_old_upload_that_no_update_follows_was_never_committed():
    uploads = [an_upload("a", 1, "g.1", name="lost"), an_upload("a", 1, "g.2"), an_upload("a", 2, "g.1")]
    assert names(committed_chains(uploads)) == {"a": ["1-", "2-"]}


def test_a_tip_that_nothing_contradicts_is_taken():
    """Its author may have died between upload and commit: to take it is as good as the commit."""
    assert names(committed_chains([an_upload("a", 1, "g.1")])) == {"a": ["1-"]}


def test_a_tip_whose_group_a_peer_trained_for_certain_is_not_taken():
    """Its author was stopped between upload and commit, and the group went to a peer."""
    stopped = [an_upload("a", 1, "g.1"), an_upload("a", 2, "g.2", "g.3")]
    peer = [an_upload("b", 1, "g.3"), an_upload("b", 2, "g.4")]
    chains = committed_chains([*stopped, *peer])
    assert names(chains) == {"a": ["1-"], "b": ["1-", "2-"]}
    assert chains.uncertain == []


def test_of_two_tips_that_exclude_each_other_the_one_that_a_peer_has_merged_is_taken():
    uploads = [an_upload("a", 1, "g.1"), an_upload("b", 1, "g.1"), an_upload("c", 1, "g.5", b=1)]
    chains = committed_chains(uploads)
    assert names(chains) == {"a": [], "b": ["1-"], "c": ["1-"]}
    assert [upload.path for upload in chains.uncertain] == ["test/updates/a/1-"]


def test_of_two_tips_that_exclude_each_other_none_is_taken_without_a_witness():
    chains = committed_chains([an_upload("a", 1, "g.1"), an_upload("b", 1, "g.1")])
    assert names(chains) == {"a": [], "b": []}
    assert [upload.path for upload in chains.uncertain] == ["test/updates/a/1-", "test/updates/b/1-"]


def test_a_group_that_was_dropped_counts_as_consumed():
    dropped = an_upload("b", 1, "g.7").model_copy(update={"dropped": {"g.1": "stale"}})
    chains = committed_chains([an_upload("a", 1, "g.1"), dropped, an_upload("b", 2, "g.8")])
    assert names(chains) == {"a": [], "b": ["1-", "2-"]}
    assert chains.consumed["g.1"][0] == "stale"


def test_uploads_under_a_strangers_key_are_not_looked_at():
    uploads = [
        an_upload("a", 1, "g.1"),
        an_upload("a", 2, "g.2"),
        an_upload("a", 3, "g.3", signer="a stranger"),
    ]
    assert names(committed_chains(uploads)) == {"a": ["1-", "2-"]}


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Manifest], dict[str, int]]:
    """Learners that commit in some order; some die or are stopped between upload and commit."""
    authors, free = ["a", "b", "c"], iter(range(1000))
    uploads: list[Manifest] = []
    counts, heads = dict.fromkeys(authors, 0), dict.fromkeys(authors, "")
    for number in range(draw(st.integers(1, 14))):
        author = draw(st.sampled_from(authors))
        groups = [f"g.{next(free)}" for _ in range(2)]
        name = str(number)
        upload = an_upload(author, counts[author] + 1, *groups, previous=heads[author], name=name)
        if draw(st.booleans()):
            counts[author] += 1
            heads[author] = upload.path
            uploads.append(upload)
        elif draw(st.booleans()):  # never committed: a peer trains a group of it
            thief = draw(st.sampled_from([other for other in authors if other != author]))
            theirs = an_upload(thief, counts[thief] + 1, groups[0], previous=heads[thief], name=f"{name}t")
            counts[thief] += 1
            heads[thief] = theirs.path
            uploads += [upload, theirs]
    return uploads, counts


@given(histories())
def test_no_group_is_ever_in_two_committed_updates_and_no_certain_update_is_lost(
    history: tuple[Sequence[Manifest], dict[str, int]],
):
    uploads, counts = history
    chains = committed_chains(uploads)
    groups = [group for chain in chains.updates.values() for m in chain for group in outcomes(m)]
    assert len(groups) == len(set(groups))
    for author, chain in chains.updates.items():
        assert [m.count for m in chain] == list(range(1, len(chain) + 1))
        assert len(chain) >= counts[author] - 1, "at most the newest one may be uncertain"
