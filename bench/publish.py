"""How long from an optimizer step to the first token sampled under it, and does publishing hold anybody up?

Each figure is of a whole run: a learner, a verifier and 1, then 8 samplers, each a process of its own as
``grpo-node`` starts it, with a nats-server on loopback and LoRA on all linear layers of SmolLM2-135M. What is
measured is what the peers themselves tell (docs/METRICS.md); nothing is patched, and no step is repeated.

    python -m bench.publish                    all stores, rank 1 and 32, 1 and 8 samplers
    python -m bench.publish --stores hub --ranks 32 --samplers 1
    python -m bench.publish --quick            a tiny model, to see that the bench works

**Phases**, each from the end of the one before (medians over versions and samplers, in seconds):

- ``snapshot``: the update is made from the factors, and the point that a failed commit returns to is copied;
  on the learner's training thread
- ``queue``: it waits for the upload of the one before
- ``upload``: serialized, hashed and signed, then written to the store until it can be read there
- ``commit``: one atomic write at the broker of the head and the groups that it consumed
- ``announce``: until a sampler hears of it
- ``busy``: that sampler is still occupied with an older version
- ``fetch``: heads read at the broker; the update downloaded, its sizes, hashes, signature and numbers checked
- ``compose``: added to genesis, and the sum's digest compared with the one the learner signed
- ``load``: checked again and put into the engine
- ``start``: until the sampler begins a group under it; waits for a task and a place in the batch, not for
  publishing: groups that run finish under their own version
- ``first_token``: that group's prefill and first step

``step_to_loaded_s`` is the sum up to ``load``, ``step_to_first_token_s`` that of all. The first group that is
whole tells of the first token, so it may be a little late. ``skipped`` versions were never loaded by some
sampler, since a newer one was there by the time; under others that were loaded (``loads``) no group began
before the next (``first_tokens`` counts the rest).

**Blocked** is wider than waiting for a lock:

- the learner: the snapshot, and any wait for a place among the steps to be committed, as a share of all time.
  ``learner_blocked_of_work`` is the same as a share of the time that it did not wait for rollouts.
- a sampler: all time between two steps of its engine while rows waited for the second, *whatever the reason*,
  and all time that tasks were held back for want of a newer policy; of the sampler that was blocked most.
  That a step takes longer while the same cores also fetch is no part of it; ``bench.switch`` asks for that.

**What this machine is not.** Eight samplers here are eight processes with a connection, a cache and an engine
with the whole model each, but they, the learner and the stores share its cores, so with 8 samplers most
phases measure how long each waits for a core. The hub is the stand-in of ``tests/hub`` in a process of its
own on loopback, spoken to by the real huggingface_hub and hf_xet: no network and no Hub is in its figures.
Rewards are made up, so that each step has an update.

**Beside it**: TRL's AsyncGRPOTrainer across HF Jobs (huggingface/blog, "Async GRPO with LoRA across HF Jobs:
a bucket, a proxy, and no NCCL", September 2026) synchronized a rank-1 adapter of Qwen2.5-Math-1.5B in 8.5 s
(p50), later 6.2 s, with all replicas paused meanwhile. That was over the internet and between GPUs: put the
blocked share beside it, not the seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median

import structlog

from bench.harness import Figure, Goal, report, say
from bench.publishing.timeline import PHASES, Timeline, Window
from node.vllm_process import free_port

ROOT = Path(__file__).parents[1]
MODEL = ROOT / ".grpo/models/smollm2-135m-instruct"
STORES = ("file", "nats", "hub")
BLOCKED = 0.01
PEER: dict[str, Figure] = {"peer/sync_s": 8.5, "peer/later_sync_s": 6.2, "peer/replicas_paused": True}


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="make it with examples/smollm2.py")
    parser.add_argument("--stores", nargs="+", default=STORES, choices=STORES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--samplers", nargs="+", type=int, default=[1, 8], help="ascending: later ones join")
    parser.add_argument("--updates", type=int, default=2, help="measured ones of each figure")
    parser.add_argument("--groups", type=int, default=4, help="of an update, of 4 rollouts each")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    parser.add_argument("--quick", action="store_true", help="a tiny model; says nothing about speed")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


@contextlib.contextmanager
def hub_at(directory: Path) -> Iterator[None]:
    """The stand-in as a process of its own, and this process and its children as alice's while the body runs.

    Enter it before anything imports huggingface_hub, which looks at the environment once.
    """
    port = free_port()
    os.environ |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_TOKEN": "hf_alice",
        # Where hf_xet remembers what this process uploaded; each node has a place of its own.
        "HF_HOME": str(directory),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    command = [sys.executable, "-m", "tests.hub", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        process.stderr.readline()  # it says how to reach it once it serves
        yield
    finally:
        process.terminate()
        process.wait()


def middle(values: Iterable[float]) -> float:
    """The median; not a number if nothing was seen."""
    return median(list(values) or [math.nan])


def figures_of(cell: str, timeline: Timeline, window: Window) -> dict[str, Figure]:
    """Medians of a cell, and how much of the time anybody was blocked."""
    ways = list(timeline.ways(window))
    sampled = [way for way in ways if way.sampled]
    found: dict[str, Figure] = {}
    for place, phase in enumerate(PHASES):
        found[f"{cell}/{phase}_s"] = middle(way.seconds[place] for way in ways if place < len(way.seconds))
    learner, of_work = timeline.learner_blocked(window)
    return found | {
        f"{cell}/step_to_loaded_s": middle(way.loaded_s for way in ways),
        f"{cell}/step_to_first_token_s": middle(way.total_s for way in sampled),
        f"{cell}/step_to_first_token_max_s": max((way.total_s for way in sampled), default=math.nan),
        f"{cell}/loads": len(ways),
        f"{cell}/first_tokens": len(sampled),
        f"{cell}/skipped": timeline.skipped(window),
        f"{cell}/update_every_s": timeline.update_every_s(window),
        f"{cell}/learner_blocked_fraction": learner,
        f"{cell}/learner_blocked_of_work": of_work,
        f"{cell}/sampler_blocked_fraction": timeline.sampler_blocked(window),
    }


def measured(options: argparse.Namespace, directory: Path) -> dict[str, Figure]:
    """All cells."""
    from bench.publishing.ring import Load, measure

    load = Load(
        options.model.absolute(), groups=options.groups, tokens=options.tokens, updates=options.updates
    )
    if options.quick:
        from node.tiny_model import tiny_model

        load = Load(tiny_model(directory, seed=0, steps=1), tiny=True, tokens=5, updates=options.updates)
    figures: dict[str, Figure] = {}

    def done(cell: str, timeline: Timeline, samplers: int, window: Window) -> None:
        cell = f"{cell}/samplers{samplers}"
        figures.update(figures_of(cell, timeline, window))
        say(f"{cell:24} {in_short(figures, cell)}")

    for rank in options.ranks:
        for store in options.stores:
            note = partial(done, f"{store}/rank{rank}")
            asyncio.run(measure(load, store, rank, options.samplers, note))
    return figures


def in_short(figures: dict[str, Figure], cell: str) -> str:
    """A cell, for a person who waits."""
    loaded, first = figures[f"{cell}/step_to_loaded_s"], figures[f"{cell}/step_to_first_token_s"]
    learner = figures[f"{cell}/learner_blocked_fraction"]
    sampler = figures[f"{cell}/sampler_blocked_fraction"]
    return (
        f"an update every {figures[f'{cell}/update_every_s']:.1f} s; loaded {loaded:.2f} s and sampled "
        f"{first:.2f} s after its step; blocked: learner {learner:.4f}, sampler {sampler:.4f}"
    )


def goals(figures: Mapping[str, Figure]) -> list[Goal]:
    """Nobody waits: the worst cell counts."""
    found = []
    for name in ("learner_blocked_fraction", "sampler_blocked_fraction"):
        shares = [value for figure, value in figures.items() if figure.endswith(f"/{name}")]
        worst = max(share for share in shares if isinstance(share, float))
        found.append(Goal(name, worst, at_most=BLOCKED))
    return found


def main() -> None:
    """Measure and report."""
    options = arguments()
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-publish-")))
        if "hub" in options.stores:
            stack.enter_context(hub_at(work / "hub"))
        found = measured(options, work)
    report({"load_average_before": load, **found, **PEER}, [] if options.quick else goals(found))


if __name__ == "__main__":
    main()
