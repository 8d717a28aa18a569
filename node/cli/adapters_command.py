"""``grpo-node adapters``: list what a run exported, and try an adapter on a prompt."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from node.settings import prepare_process, read_environment
from protocol.errors import OperatorError, StoreCorrupt, StoreNotFound

EXPORT = re.compile("[^/]+/exports/[0-9a-f]{16}")
"""Path of an export in a store; people may keep other things beside them."""

app = typer.Typer(help="Look at and try exported adapters.", no_args_is_help=True)


@app.command("list")
def list_adapters(
    store: Annotated[str, typer.Argument(help="A run's store: a directory or file:///…")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List the exported adapters of every run in a store, oldest version first."""
    from node.stores import open_store
    from protocol.manifest import EntryKind, Manifest
    from protocol.runspec import StoreSpec

    url = store if "://" in store else Path(store).expanduser().resolve().as_uri()
    opened = open_store(StoreSpec(url=url), read_environment().places.home / "cache")

    async def work() -> list[Manifest]:
        paths = [path for path in await opened.list("") if EXPORT.fullmatch(path)]
        found = []
        for path in paths:
            try:
                found.append(await opened.manifest(path))
            except (StoreCorrupt, StoreNotFound) as exc:
                print(f"left out: {exc}", file=sys.stderr)
        return [manifest for manifest in found if manifest.kind is EntryKind.EXPORT]

    exports = sorted(asyncio.run(work()), key=lambda manifest: sum(count for _, count in manifest.clock))
    if as_json:
        print(json.dumps([{"path": m.path, "run": m.run, "clock": m.clock.text} for m in exports]))
        return
    for manifest in exports:
        print(f"{manifest.run:<20} {manifest.clock.text:<24} {url.removeprefix('file://')}/{manifest.path}")
    if not exports:
        print(f"no exported adapters in {url}")


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
