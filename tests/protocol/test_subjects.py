"""Names on the broker are legal there, and no two runs share one."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from protocol.messages import GroupId
from protocol.spec import Name
from protocol.subjects import (
    GENESIS_KEY,
    SPEC_KEY,
    TRAINING,
    Bucket,
    Names,
    Queue,
    cursor_key,
    done_key,
    head_key,
)
from tests.protocol.strategies import names as runs

QUICK = settings(max_examples=100, deadline=None)

SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
STREAM = re.compile(r"[^\s.*>/\\]{1,255}")
BUCKET = re.compile(r"[a-zA-Z0-9_-]+")
KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


def subjects_of(run: str) -> list[str]:
    names = Names(run)
    return [
        *(names.subject(queue, "node-1") for queue in Queue),
        names.dead_subject("node-1"),
        names.event_subject("learner", "node-1"),
        names.announce_subject("node-1"),
        *(names.kv_subject(bucket, "key") for bucket in Bucket),
    ]


def stores_of(run: str) -> list[str]:
    """Streams and buckets, which share one space of names: a bucket is the stream ``KV_`` or ``OBJ_``."""
    names = Names(run)
    streams = [names.stream(queue) for queue in Queue]
    kv = [names.kv_stream(bucket) for bucket in Bucket]
    return [
        *streams,
        names.dead_stream,
        names.event_stream,
        *kv,
        *(names.blob_stream(queue) for queue in TRAINING),
    ]


@QUICK
@given(runs)
def test_every_name_is_legal_for_every_legal_run(run: str):
    assert TypeAdapter(Name).validate_python(run) == run
    assert all(SUBJECT.fullmatch(subject) for subject in subjects_of(run))
    assert all(STREAM.fullmatch(stream) for stream in stores_of(run))
    assert all(BUCKET.fullmatch(Names(run).bucket(bucket)) for bucket in Bucket)


@QUICK
@given(runs)
def test_a_run_has_no_name_twice(run: str):
    for names in (subjects_of(run), stores_of(run)):
        assert len(set(names)) == len(names)


@QUICK
@given(runs, runs)
def test_two_runs_share_no_name(one: str, two: str):
    assume(one != two)
    assert not set(subjects_of(one)) & set(subjects_of(two))
    assert not set(stores_of(one)) & set(stores_of(two))


@pytest.mark.parametrize(
    ("one", "two"), [("a", "a-task"), ("a", "a-eval"), ("eval", "task"), ("a-run", "a"), ("dead", "event")]
)
def test_runs_with_names_like_our_own_words_share_no_name(one: str, two: str):
    assert not set(subjects_of(one)) & set(subjects_of(two))
    assert not set(stores_of(one)) & set(stores_of(two))


@pytest.mark.parametrize("run", ["", "A", "a.b", "a_b", "-a", "a b", "a*", ">", "a\n", "ä", "a" * 49])
def test_a_name_that_would_change_a_subject_is_no_name(run: str):
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(run)


@settings(max_examples=200, deadline=None)
@given(st.text("ab1-_.*> /\n", max_size=8))
def test_whatever_is_a_group_id_makes_a_legal_key(text: str):
    try:
        group_id = TypeAdapter(GroupId).validate_python(text)
    except ValidationError:
        return
    assert KEY.fullmatch(done_key(group_id))


@QUICK
@given(runs, runs)
def test_keys_are_legal_and_distinct(one: str, two: str):
    keys = [head_key(one), cursor_key(one), done_key(one), done_key(f"{one}.{two}"), SPEC_KEY, GENESIS_KEY]
    assert all(KEY.fullmatch(key) for key in keys)
    assert len(set(keys)) == len(keys)
    assert (head_key(one) == head_key(two)) == (one == two)


def test_each_subject_begins_with_the_protocol_version_and_the_run():
    assert Names("r").subject(Queue.TASK, "l-1") == "grpo.v1.r.task.l-1"
    assert Names("r").subject(Queue.EVAL_VERIFIED, "*") == "grpo.v1.r.eval.verified.*"
    assert Names("r").event_subject("*", "*") == "grpo.v1.r.event.*.*"
    assert Names("r").dead_subject("*") == "grpo.v1.r.dead.*"
    assert Names("r").announce_subject("*") == "grpo.v1.r.announce.*"


def test_takers_of_a_training_queue_and_of_its_evaluation_twin_are_the_same_peers():
    names = Names("r")
    assert [names.consumer(queue) for queue in TRAINING] == ["samplers", "verifiers", "learners"]
    for queue, twin in product(TRAINING, Queue):
        if twin.value == f"eval.{queue.value}":
            assert names.consumer(queue) == names.consumer(twin)
            assert names.stream(queue) != names.stream(twin)
