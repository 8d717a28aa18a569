"""What an operator decides: the environment, what is refused, where things lie, and who gets which cores."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.settings import (
    Environment,
    NodeSettings,
    Places,
    Role,
    child_environment,
    free_threads,
    prepare_hub,
    read_environment,
    share_threads,
)
from protocol.errors import OperatorError

HERE = Environment(Places(Path("home")), broker=None, token=None, nats_server=None, cores=4, load=0.0)
LEARNER: tuple[Role, ...] = ("learner",)
SAMPLER: tuple[Role, ...] = ("sampler",)
VERIFIER: tuple[Role, ...] = ("verifier",)
DEMO = (LEARNER, SAMPLER, SAMPLER, VERIFIER)


def some_settings(**changes: Any) -> NodeSettings:
    fields: dict[str, Any] = {"run": "sums", "roles": ("sampler",), "broker": "nats://127.0.0.1:1"}
    return NodeSettings(**(fields | changes))


def test_the_environment_says_where_home_broker_and_server_are():
    said = {"GRPO_HOME": "/h", "GRPO_BROKER": "nats://b:1", "GRPO_TOKEN": "t", "GRPO_NATS_SERVER": "/s"}
    found = read_environment(said)
    assert (found.places.home, found.broker, found.token) == (Path("/h"), "nats://b:1", "t")
    assert found.nats_server == Path("/s")
    assert found.cores >= 1
    assert found.load >= 0


def test_a_tilde_in_the_environment_is_the_users_home():
    found = read_environment({"GRPO_HOME": "~/grpo", "GRPO_NATS_SERVER": "~/nats-server"})
    assert found.places.home == Path.home() / "grpo"
    assert found.nats_server == Path.home() / "nats-server"


def test_an_empty_environment_says_nothing():
    found = read_environment({})
    assert (found.broker, found.token, found.nats_server) == (None, None, None)
    assert found.places.home.name == "grpo-node"
    assert found.places.home.is_relative_to(Path.home())


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no XDG directories")
def test_home_lies_in_the_cache_directory_that_the_given_environment_names():
    assert read_environment({"XDG_CACHE_HOME": "/caches"}).places.home == Path("/caches/grpo-node")


def test_each_node_and_each_broker_has_a_place_of_its_own():
    places = Places(Path("home"))
    assert places.models == Path("home/models")
    kept = [places.node("a", "x"), places.node("a", "y"), places.node("b", "x"), places.broker("x")]
    assert len(set(kept)) == 4
    assert all(place.is_relative_to(places.home) for place in kept)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"roles": ("trainer",)}, "roles are learner, sampler, verifier"),
        ({"roles": ()}, "at least one --role"),
        ({"roles": ("sampler", "sampler")}, "plays a role once"),
        ({"run": "Sums"}, "--run 'Sums'"),
        ({"run": ""}, "--run ''"),
        ({"run": "a/b"}, "--run"),
        ({"run": "x" * 49}, "at most 48"),
        ({"name": "-x"}, "--name '-x'"),
        ({"name": ""}, "--name ''"),
        ({"threads": 0}, "--threads must be at least 1"),
    ],
)
def test_settings_no_node_could_run_with_are_refused_in_one_line(changes: dict[str, Any], says: str):
    with pytest.raises(OperatorError) as refused:
        some_settings(**changes)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_all_roles_together_and_the_longest_name_are_accepted():
    accepted = some_settings(roles=("learner", "sampler", "verifier"), run="x" * 48, name="0", threads=1)
    assert len(accepted.roles) == 3


@pytest.mark.parametrize(("cores", "shares"), [(1, [1, 1, 1, 1]), (2, [1, 1, 1, 1]), (4, [2, 1, 1, 1])])
def test_few_cores_go_to_the_first_that_compute_and_everybody_has_one(cores: int, shares: list[int]):
    assert share_threads(replace(HERE, cores=cores), DEMO) == shares


def test_many_cores_are_divided_among_those_that_compute():
    assert share_threads(replace(HERE, cores=16), DEMO) == [6, 5, 5, 1]
    assert share_threads(replace(HERE, cores=16), [VERIFIER, SAMPLER]) == [1, 16]
    assert share_threads(replace(HERE, cores=4), [("learner", "sampler", "verifier")]) == [4]


def test_peers_that_only_verify_have_one_thread_each_and_nobody_has_none():
    assert share_threads(replace(HERE, cores=16), [VERIFIER, VERIFIER]) == [1, 1]
    assert share_threads(HERE, []) == []


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
@pytest.mark.parametrize("peers", [DEMO, (LEARNER,), (LEARNER, LEARNER, SAMPLER), (SAMPLER,) * 3])
def test_those_that_compute_use_every_core_and_none_twice_unless_there_are_too_few(
    cores: int, peers: tuple[tuple[Role, ...], ...]
):
    shares = share_threads(replace(HERE, cores=cores), peers)
    heavy = [share for share, roles in zip(shares, peers, strict=True) if roles != VERIFIER]
    assert sum(heavy) == max(cores, len(heavy))
    assert max(heavy) - min(heavy) <= 1


@pytest.mark.parametrize(
    ("cores", "load", "threads"),
    [(1, 0.0, 1), (1, 3.0, 1), (2, 0.1, 2), (2, 1.0, 1), (4, 1.2, 3), (16, 0.0, 16), (16, 40.0, 1)],
)
def test_a_node_alone_takes_the_cores_that_others_leave_free(cores: int, load: float, threads: int):
    assert free_threads(replace(HERE, cores=cores, load=load)) == threads


def test_a_child_gets_this_environment_and_what_is_added(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRPO_HOME", "/old")
    monkeypatch.setenv("GRPO_BROKER", "nats://b:1")
    found = child_environment({"GRPO_HOME": "/new"})
    assert (found["GRPO_HOME"], found["GRPO_BROKER"]) == ("/new", "nats://b:1")


def test_a_nodes_transfers_have_a_cache_of_their_own_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.delenv("HF_XET_CACHE")
    monkeypatch.setenv("HF_XET_CLIENT_READ_TIMEOUT", "7s")
    prepare_hub(tmp_path)
    assert os.environ["HF_XET_CACHE"] == str(tmp_path)
    assert os.environ["HF_XET_CLIENT_READ_TIMEOUT"] == "7s"
