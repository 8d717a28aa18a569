"""A simulated user runs in a process of its own, knows what it may, and its faults are said to the model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from protocol.errors import EngineError, OperatorError
from protocol.messages import Told
from protocol.user_spec import UserSpec
from roles.sandbox.confinement import Protection
from roles.turns.users import UserProcess, check_user

MODULE = "tests.roles.turns.user_functions"
TOLD = Told(prompt="2+3", system_prompt="Be short.", columns={"mood": "sad"})


def a_user(function: str, **fields: Any) -> UserSpec:
    return UserSpec(function=function if ":" in function else f"{MODULE}:{function}", **fields)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": content}]


@contextlib.asynccontextmanager
async def a_process(function: str, **fields: Any) -> AsyncIterator[UserProcess]:
    opened = await UserProcess.open(a_user(function, **fields))
    try:
        yield opened
    finally:
        await opened.close()


async def test_it_is_told_all_messages_and_the_rows_prompt_and_columns():
    async with a_process("repeats") as user:
        known = json.loads(await user.answer(TOLD, said("5")) or "")
    assert known == {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "2+3"},
            {"role": "assistant", "content": "5"},
        ],
        "row": {"prompt": "2+3", "mood": "sad"},
    }


async def test_it_may_be_a_coroutine_and_none_ends_the_rollout():
    async with a_process("hurried") as user:
        told = Told(prompt="2+3", columns={"mood": "sad"})
        assert await user.answer(told, said("5")) == "hurry, sad"
        assert await user.answer(told, [*said("5"), *said("6")]) is None
        assert await user.answer(told, said("5")) == "hurry, sad", "each call is one of its own"


@pytest.mark.parametrize(
    ("content", "heard"),
    [
        ("end", None),
        ("null", "none"),
        ("error", "error: mine"),
        ("blank", ""),
        ("much", "x" * 20 + " (cut after 20 characters)"),
        ("number", "error: TypeError: a " + " (cut after 20 characters)"),
        ("unknown", "error: KeyError: 'un" + " (cut after 20 characters)"),
    ],
)
async def test_a_text_is_said_none_ends_it_and_anything_else_is_a_fault(content: str, heard: str | None):
    async with a_process("moody", reply_chars_max=20) as user:
        assert await user.answer(TOLD, said(content)) == heard


@pytest.mark.parametrize(
    ("content", "heard"),
    [
        ("die", "error: its process died"),
        ("hang", "error: it took longer than 2 s"),
        ("number", "error: TypeError: a int is neither text nor None"),
    ],
)
async def test_what_goes_wrong_is_said_to_the_model_and_logged(content: str, heard: str):
    async with a_process("moody", timeout_s=2.0) as user:
        with structlog.testing.capture_logs() as logs:
            assert await user.answer(TOLD, said(content)) == heard
        assert [(log["event"], log["why"]) for log in logs] == [("user_failed", heard)]
        assert await user.answer(TOLD, said("error")) == "error: mine", "the next one goes on"


async def test_a_process_that_was_killed_fails_what_it_ran_and_is_started_again():
    async with a_process("moody", timeout_s=30.0) as user:
        hanging = asyncio.ensure_future(user.answer(TOLD, said("hang")))
        assert await user.answer(TOLD, said("null")) == "none"
        assert user._process._process
        os.kill(user._process._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the user's process died"):
            await hanging
        assert await user.answer(TOLD, said("null")) == "none"


async def test_it_reads_no_files_of_the_sampler(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    async with a_process("moody") as user:
        if set(user._process.protections) != set(Protection):
            pytest.skip(f"this kernel gives {', '.join(user._process.protections)} only")
        heard = await user.answer(Told(prompt="2+3", columns={"path": str(secret)}), said("read"))
    assert heard is not None
    assert heard.startswith("error: ")
    assert "mine" not in heard


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_such_module:f", "user no_such_module:f: cannot import it: ModuleNotFoundError"),
        ("nothing", "has no nothing"),
        ("NOBODY", "a int is no function"),
        ("lonely", "it is called with messages and row: too many positional arguments"),
    ],
)
async def test_what_is_no_user_is_told_in_one_line(function: str, why: str):
    with pytest.raises(OperatorError, match=why):
        await check_user(a_user(function))
