"""Tools run in a process of their own: described, called, limited, kept away from the sampler's machine."""

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

from protocol.errors import EngineError, OperatorError
from protocol.tools_spec import ToolsSpec
from roles.sandbox.confinement import Protection
from roles.turns.calls import ToolCall
from roles.turns.tools import ToolProcess, describe

MODULE = "tests.roles.turns.tool_functions"


def a_spec(*names: str, **fields: Any) -> ToolsSpec:
    functions = [name if ":" in name else f"{MODULE}:{name}" for name in names]
    return ToolsSpec(functions=tuple(functions), **fields)


@contextlib.asynccontextmanager
async def tools(*names: str, **fields: Any) -> AsyncIterator[ToolProcess]:
    opened = await ToolProcess.open(a_spec(*names, **fields))
    try:
        yield opened
    finally:
        await opened.close()


async def test_the_model_is_told_names_purposes_and_types():
    described = json.loads((await describe(a_spec("total", "shout"))).schemas or "")
    total, shout = (one["function"] for one in described)
    assert total == {
        "name": "total",
        "description": "Add numbers up.\n\nUnits are kept.",
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "numbers": {"type": "array", "items": {"type": "number"}},
                "unit": {"type": "string", "enum": ["m", "km"], "default": "m"},
            },
            "required": ["numbers"],
        },
    }
    assert shout["parameters"]["properties"] == {"text": {"type": "string", "description": "what to shout"}}


async def test_texts_are_said_as_they_are_and_values_as_json():
    async with tools("total", "shout") as opened:
        assert await opened.reply(ToolCall("shout", {"text": "é"})) == "É"
        said = await opened.reply(ToolCall("total", {"numbers": [1, 2.5], "unit": "km"}))
        assert said == '{"total": 3.5, "unit": "km"}'


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (ToolCall("nobody"), "error: there is no such tool; there are: broken, dying, greedy, total"),
        (ToolCall("total", {"numbers": "x"}), "error: numbers: Input should be a valid list"),
        (ToolCall("total"), "error: numbers: Field required"),
        (ToolCall("total", {"numbers": [], "and": 1}), "error: and: no such setting; check the spelling"),
        (ToolCall("", fault="this is no JSON"), "error: this is no JSON"),
        (ToolCall("broken"), r"error: KeyError: 'nothing\nhere'"),
        (ToolCall("dying"), "error: its process died"),
        (ToolCall("greedy", {"megabytes": 2000}), "error: MemoryError:"),
    ],
)
async def test_what_goes_wrong_is_told_to_the_model(call: ToolCall, said: str):
    async with tools("total", "broken", "dying", "greedy", memory_bytes_max=256 << 20) as opened:
        assert await opened.reply(call) == said
        assert await opened.reply(ToolCall("total", {"numbers": [1]})), "the others go on"


async def test_a_call_that_hangs_costs_its_own_time_limit_and_no_other_call():
    async with tools("forever", "total", timeout_s=2.0) as opened:
        hanging = asyncio.ensure_future(opened.reply(ToolCall("forever")))
        replies = await asyncio.gather(*(opened.reply(ToolCall("total", {"numbers": [n]})) for n in range(8)))
        assert not hanging.done()
        assert [json.loads(reply)["total"] for reply in replies] == list(range(8))
        assert await hanging == "error: it took longer than 2 s"


async def test_a_long_reply_is_cut_and_says_so():
    async with tools("long", reply_chars_max=10) as opened:
        assert await opened.reply(ToolCall("long", {"characters": 10})) == "x" * 10
        assert (
            await opened.reply(ToolCall("long", {"characters": 10**7}))
            == "x" * 10 + " (cut after 10 characters)"
        )


async def test_a_process_that_was_killed_fails_what_it_ran_and_is_started_again():
    async with tools("forever", "total", timeout_s=30.0) as opened:
        hanging = asyncio.ensure_future(opened.reply(ToolCall("forever")))
        assert json.loads(await opened.reply(ToolCall("total", {"numbers": [2]})))["total"] == 2
        assert opened._process
        os.kill(opened._process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="the tools' process died"):
            await hanging
        assert json.loads(await opened.reply(ToolCall("total", {"numbers": [3]})))["total"] == 3


async def test_tools_see_no_files_no_network_and_no_other_programs(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("mine")
    async with tools("read", "connect", "start") as opened:
        if set(opened.protections) != set(Protection):
            pytest.skip(f"this kernel gives {', '.join(opened.protections)} only")
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            calls = [("read", {"path": str(secret)}), ("connect", {"port": port}), ("start", {})]
            said = [await opened.reply(ToolCall(name, arguments)) for name, arguments in calls]
    assert [one.partition(":")[0] for one in said] == ["error"] * 3
    assert "mine" not in said[0]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no_such_module:f", "cannot import it: ModuleNotFoundError"),
        ("nobody", "has no nobody"),
        ("add", "a int is no function"),
        ("untyped", "its parameters cannot be described: a has no type"),
        ("many", "words is not a parameter that can be named"),
    ],
)
async def test_what_is_no_tool_is_told_in_one_line(name: str, why: str):
    with pytest.raises(OperatorError, match=why):
        await describe(a_spec(name))


async def test_two_tools_of_one_name_are_refused():
    with pytest.raises(OperatorError, match="another tool of the name total"):
        await describe(a_spec("total", "total"))


async def test_functions_that_are_not_the_runs_are_refused():
    pinned = await describe(a_spec("total"))
    opened = await ToolProcess.open(pinned)
    await opened.close()
    other = pinned.model_copy(update={"functions": a_spec("shout").functions})
    with pytest.raises(OperatorError, match="not those that the run was created with"):
        await ToolProcess.open(other)


@pytest.mark.parametrize("function", ["total", "a b:c", "m:f()", "../m:f", ":f", "m:"])
def test_a_function_is_named_by_module_and_name(function: str):
    with pytest.raises(ValueError, match="functions"):
        ToolsSpec(functions=(function,))
