"""The embedded broker: a real nats-server with JetStream on this machine.

One state directory holds one broker's data, logins, port and log, and is locked by the server process
itself, so whoever starts a second one joins the first. Loopback only unless told otherwise, and never
without a login: a token that may do everything, or accounts (``node/broker_accounts.py``).
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import structlog

from node.broker_access import BrokerAccess
from node.broker_accounts import OPERATOR_CREDENTIALS, Accounts
from node.broker_binary import find_server, version_text
from node.broker_config import LOG_FILE, PORT_FILE, BrokerOptions, choose_port, server_config
from node.private_file import write_private
from protocol.errors import OperatorError

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.005

log = structlog.get_logger("broker")


SERVER_FILE = "server.json"
"""How to reach and enter the broker that runs on a directory; readable by its owner only."""

_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, kept across exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


_DEFAULTS = BrokerOptions()


@dataclass(slots=True)
class Broker:
    """A running broker; ``process`` is None if somebody else started it."""

    access: BrokerAccess
    pid: int
    version: str
    state_dir: Path
    process: subprocess.Popen[bytes] | None

    @property
    def url(self) -> str:
        """Where it listens: ``nats://host:port``."""
        return self.access.url

    @property
    def token(self) -> str:
        """What a client of a broker without accounts must show."""
        assert self.access.token is not None, "this broker has accounts"
        return self.access.token

    @property
    def joined(self) -> bool:
        """Whether this broker belongs to another process, which also stops it."""
        return self.process is None

    @property
    def alive(self) -> bool:
        """Whether the server process still runs."""
        return _pid_alive(self.pid) if self.process is None else self.process.poll() is None

    def stop(self) -> None:
        """Let the server finish and end; a joined broker is left running."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        (self.state_dir / SERVER_FILE).unlink(missing_ok=True)
        log.info("broker_stopped", pid=self.pid)


def start_broker(
    state_dir: Path,
    *,
    port: int | None = None,
    binary: Path | None = None,
    options: BrokerOptions = _DEFAULTS,
) -> Broker:
    """Start a broker on ``state_dir``, or join the one that runs there.

    Blocks for some 60 ms. Data and token survive a restart, and so does the port: None means that of
    last time if it is still free, else any. ``binary`` is used instead of looking for a nats-server.
    Raises OperatorError: no usable nats-server, the port is taken, the directory cannot be written,
    the server died at start (with its last log line).
    """
    state_dir = state_dir.absolute()
    lock = _lock(state_dir)
    if lock is None:
        return _join(state_dir)
    with lock:
        path, version = find_server(binary)
        accounts = Accounts.open(state_dir) if options.accounts or Accounts.exist(state_dir) else None
        token = _token(state_dir) if accounts is None else None
        login = (
            {"authorization": {"token": token}}
            if accounts is None
            else accounts.settings(options.max_file_bytes)
        )
        listen = f"{options.host}:{choose_port(state_dir, options.host, port)}"
        process = _launch(state_dir, path, server_config(state_dir, listen, login, options), lock, options)
        try:
            url = _await_ready(state_dir, process, path)
            state = {"url": url, "token": token, "pid": process.pid, "version": version_text(version)}
            write_private(state_dir / SERVER_FILE, json.dumps(state))
        except OperatorError:
            process.kill()
            process.wait()
            raise
    log.info("broker_started", url=url, pid=process.pid, version=version_text(version))
    return Broker(_access(state_dir, url, token), process.pid, version_text(version), state_dir, process)


def running_broker(state_dir: Path) -> Broker | None:
    """The broker that another process runs on this directory now, or None."""
    try:
        state = json.loads((state_dir / SERVER_FILE).read_text())
        if _pid_alive(state["pid"]):
            access = _access(state_dir, state["url"], state["token"])
            return Broker(access, state["pid"], state["version"], state_dir, None)
    except (OSError, ValueError, KeyError):
        pass
    return None


def _access(state_dir: Path, url: str, token: str | None) -> BrokerAccess:
    """How the broker's owner enters."""
    credentials = None if token is not None else state_dir / OPERATOR_CREDENTIALS
    return BrokerAccess(url, token=token, credentials=credentials)


def _lock(state_dir: Path) -> IO[str] | None:
    """An exclusive lock on the state directory, or None if a live server holds it."""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (state_dir / ".lock").open("a+")
    except OSError as exc:
        raise OperatorError(f"{state_dir}: cannot keep a broker's state there: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def _join(state_dir: Path) -> Broker:
    """The broker that another process runs, or is about to run, on this directory."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if (running := running_broker(state_dir)) is not None:
            return running
        time.sleep(POLL_S)
    raise OperatorError(f"{state_dir}: another broker holds this directory but does not answer; stop it")


def _launch(
    state_dir: Path, binary: Path, config: dict[str, Any], lock: IO[str], options: BrokerOptions
) -> subprocess.Popen[bytes]:
    for old in state_dir.glob("*.ports"):
        old.unlink()
    conf = state_dir / "nats.conf"
    write_private(conf, json.dumps(config, indent=1))
    command = [str(binary), "-c", str(conf)]
    if options.die_with_parent and sys.platform == "linux":
        # Not preexec_fn: this process may have threads, and is large to fork.
        command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # The server inherits the lock and so holds the directory for exactly as long as it lives.
        pass_fds=(lock.fileno(),),
        # Ctrl-C in a terminal must not reach the broker before the nodes that still need it.
        start_new_session=True,
    )


def _await_ready(state_dir: Path, process: subprocess.Popen[bytes], binary: Path) -> str:
    ports_file = state_dir / f"{binary.name}_{process.pid}.ports"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise OperatorError(f"nats-server stopped at once: {_last_words(state_dir)}")
        with suppress(OSError, ValueError, LookupError):
            url = str(json.loads(ports_file.read_text())["nats"][0])
            write_private(state_dir / PORT_FILE, url.rpartition(":")[2])
            return url
        time.sleep(POLL_S)
    raise OperatorError(f"nats-server was not ready within {START_TIMEOUT_S:g} s: {_last_words(state_dir)}")


def _last_words(state_dir: Path) -> str:
    """The last fatal line of the log, or its last line, without the time stamp."""
    try:
        lines = (state_dir / LOG_FILE).read_text(errors="replace").splitlines()
    except OSError:
        return f"it left no log; try it by hand with -c {state_dir / 'nats.conf'}"
    fatal = [line for line in lines if "[FTL]" in line or "[ERR]" in line]
    last = (fatal or lines or ["(empty log)"])[-1]
    return last.partition("] ")[2].strip() or last


def _token(state_dir: Path) -> str:
    """This directory's token: made once, so that clients find their way back after a restart."""
    path = state_dir / "token"
    with suppress(OSError):
        if token := path.read_text().strip():
            return token
    token = secrets.token_urlsafe(32)
    write_private(path, token)
    return token


def _pid_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
