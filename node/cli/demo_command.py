"""``grpo-node demo``: a whole swarm on this machine, in under three minutes."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from node.settings import prepare_process, read_environment

if TYPE_CHECKING:
    from node.demo import DemoResult

UPDATES = 200


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Seed of model, tasks and training.")] = 0,
    updates: Annotated[int, typer.Option(min=10, help="Updates to train for.")] = UPDATES,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where everything goes. [default: .grpo/demo-TIME]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on the last line.")
    ] = False,
) -> None:
    """Watch a swarm learn on this machine: no account, no download, no GPU.

    Starts a broker, a learner, two samplers and a verifier as separate processes, kills a sampler on
    the way, and ends with the reward curve, the adapter, and what to do next.
    """
    prepare_process(1)
    from node.cli.show import Shower, run_shown
    from node.demo import run_demo
    from node.plot import save_curve
    from node.progress import curve
    from node.telemetry import set_up_logs

    set_up_logs("error")
    environment = read_environment()
    place = directory or Path(".grpo") / time.strftime("demo-%Y%m%d-%H%M%S")

    async def work(shower: Shower) -> DemoResult:
        return await run_demo(
            environment, place, seed=seed, updates=updates, say=shower.say, show=shower.show
        )

    result = run_shown(work, as_json=as_json, when_stopped=f"what it did lies in {place}")
    picture = save_curve(place / "curve.png", result.curve, result.evals, "success rate")
    if as_json:
        found = {k: v for k, v in asdict(result).items() if k not in {"curve", "evals"}}
        print(json.dumps({**found, "picture": str(picture)}))
        return
    print("\n".join(curve(result.curve)))
    for line in summary(result, picture):
        print(line)


def summary(result: DemoResult, picture: Path) -> list[str]:
    """The last words of a demo."""
    program = how_called(sys.argv[0])
    dropped = ", ".join(f"{n} {reason}" for reason, n in sorted(result.groups_dropped.items())) or "none"
    return [
        "",
        f"success on held-out problems: {result.eval_first:.3f} -> {result.eval_last:.3f}",
        f"reward in training: {result.reward_first:.2f} -> {result.reward_last:.2f}",
        f"{result.updates} updates from {result.groups_trained} groups in {result.train_s:.0f} s of training",
        f"staleness at most {result.staleness_max:.0f}; groups dropped: {dropped}",
        f"killed on the way: {', '.join(result.killed)}; groups trained twice: {result.groups_trained_twice}",
        f"importance ratio on fresh groups: 1 within {result.ratio_deviation_max:.1e}",
        "",
        f"curve    {picture}",
        f"adapter  {result.adapter}",
        f"try it   {program} adapters try {result.adapter} '4213>'",
        f"next     {program} up examples/smollm2-arithmetic.toml   (a real model; README.md tells how)",
    ]


def how_called(argv0: str) -> str:
    """This program as a person can call it again: by name if the shell finds it, by path otherwise."""
    if Path(argv0).name != "grpo-node":
        return "python -m node"
    found = shutil.which("grpo-node")
    if found is not None and Path(found).samefile(argv0):
        return "grpo-node"
    return os.path.relpath(argv0)
