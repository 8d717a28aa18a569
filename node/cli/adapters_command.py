"""``grpo-node adapters``: list and fetch what a run exported, and try an adapter on a prompt."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from node.cli.run_commands import BrokerOption, TokenOption, connected
from node.settings import prepare_process, read_environment
from protocol.errors import OperatorError, StoreCorrupt, StoreNotFound
from protocol.ports import AdapterStore

T = TypeVar("T")

EXPORT = re.compile("[^/]+/exports/[0-9a-f]{16}")
"""Path of an export in a store; people may keep other things beside them."""

app = typer.Typer(help="Look at and try exported adapters.", no_args_is_help=True)


StoreArgument = Annotated[
    str, typer.Argument(help="A run's store: a directory, file:///…, hf://buckets/… or nats://")
]
RunOption = Annotated[str | None, typer.Option(help="Name of the run, where the store is nats://.")]


@app.command("list")
def list_adapters(
    store: StoreArgument,
    run: RunOption = None,
    broker: BrokerOption = None,
    token: TokenOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List the exported adapters of every run in a store, oldest version first."""
    from protocol.manifest import EntryKind, Manifest

    async def work(opened: AdapterStore) -> list[Manifest]:
        paths = [path for path in await opened.list("") if EXPORT.fullmatch(path)]
        found = []
        for path in paths:
            try:
                found.append(await opened.manifest(path))
            except (StoreCorrupt, StoreNotFound) as exc:
                print(f"left out: {exc}", file=sys.stderr)
        return [manifest for manifest in found if manifest.kind is EntryKind.EXPORT]

    found = _with_store(store, run, broker, token, work)
    exports = sorted(found, key=lambda manifest: sum(count for _, count in manifest.clock))
    if as_json:
        print(json.dumps([{"path": m.path, "run": m.run, "clock": m.clock.text} for m in exports]))
        return
    for manifest in exports:
        print(f"{manifest.run:<20} {manifest.clock.text:<24} {_where(store, manifest.path)}")
    if not exports:
        print(f"no exported adapters in {_where(store, '')}")


@app.command("fetch")
def fetch_adapter(
    store: StoreArgument,
    path: Annotated[str, typer.Argument(help="RUN/exports/DIGEST, as list shows it.")],
    to: Annotated[Path, typer.Option(help="The directory to make.")] = Path("adapter"),
    run: RunOption = None,
    broker: BrokerOption = None,
    token: TokenOption = None,
) -> None:
    """Copy an exported adapter, verified, into a directory that PEFT and vLLM load as it is."""

    async def work(opened: AdapterStore) -> None:
        copy = await opened.fetch(path)
        await asyncio.to_thread(shutil.copytree, copy, to)

    if to.exists():
        raise OperatorError(f"--to {to}: it is there already; choose another directory")
    try:
        _with_store(store, run, broker, token, work)
    except (StoreNotFound, StoreCorrupt) as exc:
        raise OperatorError(f"{exc}; see: grpo-node adapters list {store}") from exc
    print(to)


@app.command("try")
def try_adapter(
    adapter: Annotated[Path, typer.Argument(help="A PEFT directory that a run exported.")],
    prompt: Annotated[str, typer.Argument(help="What to complete, exactly as it is.")],
    count: Annotated[int, typer.Option(min=1, help="Completions to sample.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    base: Annotated[str | None, typer.Option(help="Base model; default: the one the adapter names.")] = None,
) -> None:
    """Sample completions from a base model with and without an adapter, side by side."""
    environment = read_environment()
    prepare_process(environment.cores)
    config = adapter / "adapter_config.json"
    if not config.is_file():
        raise OperatorError(f"{adapter}: no adapter_config.json there; a run's exports are such directories")
    from node.models import resolve_model
    from node.try_adapter import complete
    from protocol.runspec import ModelSpec

    ref = base or str(json.loads(config.read_text())["base_model_name_or_path"])
    model = resolve_model(ModelSpec(ref=ref), environment.places.models)
    pairs = complete(
        model.directory, adapter, prompt, count=count, tokens=tokens, temperature=temperature, chat=chat
    )
    print(f"{'base model':<40} with the adapter")
    for before, after in pairs:
        print(f"{before!r:<40} {after!r}")


def _with_store(
    store: str,
    run: str | None,
    broker: str | None,
    token: str | None,
    work: Callable[[AdapterStore], Coroutine[Any, Any, T]],
) -> T:
    """What ``work`` finds in a store; one in a broker needs a connection to it. Raises OperatorError."""
    from node.runs import located_store
    from node.stores import BrokerPlace, open_store, store_place
    from protocol.store_spec import StoreSpec

    environment = read_environment()
    spec = located_store(StoreSpec(url=store))
    cache = environment.places.home / "cache"

    async def connected_work() -> T:
        if not isinstance(store_place(spec), BrokerPlace):
            return await work(open_store(spec, cache))
        if not run:
            raise OperatorError("nats:// holds a store for each run; say which with --run NAME")
        async with connected(broker, token, environment, run) as bus:
            return await work(open_store(spec, cache, bus))

    return asyncio.run(connected_work())


def _where(store: str, path: str) -> str:
    """Where a person finds a path: on this machine, or as ``adapters fetch`` takes it."""
    from node.stores import FilePlace, store_place
    from protocol.store_spec import StoreSpec

    if "://" not in store:
        return str(Path(store).expanduser().resolve() / path)
    place = store_place(StoreSpec(url=store))
    return str(place.root / path) if isinstance(place, FilePlace) else f"{store} {path}".rstrip()
