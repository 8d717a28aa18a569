"""Play seeds: each is a small run in bad weather, under virtual time, judged by the promises.

    python -m tests.sim                                  200 seeds, on every core
    python -m tests.sim --seed 17                        one, with a trace of what happened
    python -m tests.sim --seeds 5000 --first-seed 1000   a long night

The last line says how many seeds passed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.sim.plan import Plan
from tests.sim.plants import PLANTS
from tests.sim.play import Verdict, play

FAILURES_TOLD = 20


def say(*lines: str) -> None:
    """For the person who typed the command."""
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    """What to play."""
    parser = argparse.ArgumentParser(
        prog="just sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="play one seed and print its trace")
    parser.add_argument("--seeds", type=int, default=200, help="how many")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--plant", choices=PLANTS, help="with a bug on purpose (one seed only)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args()


def replay(seed: int) -> bool:
    """Print what happens under one seed."""
    say(f"seed {seed}: {Plan.of(seed).text}")
    verdict = play(seed, keep_trace=True)
    say(*verdict.lines)
    say(f"seed {seed}: {verdict.failure or 'passed'} ({verdict.seconds:.0f} s of virtual time)")
    return verdict.passed


def play_all(seeds: range, jobs: int) -> bool:
    """Play many seeds and say what happened to them."""
    began, failed, happened = time.monotonic(), 0, Counter[str]()
    virtual_s = calm_s = 0.0
    # Spawned: every worker begins as a replay does.
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for verdict in pool.map(play, seeds, chunksize=4):
            happened.update(verdict.happened)
            virtual_s += verdict.seconds
            calm_s = max(calm_s, verdict.calm_s)
            failed += _told_if_failed(verdict, failed)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(happened.items()))
    say(f"large faults: {kinds}")
    say(
        f"{virtual_s / 3600:.1f} h of virtual time in {time.monotonic() - began:.0f} s; "
        f"at most {calm_s:.0f} s from the last fault to the end of a run"
    )
    say(f"{len(seeds) - failed} of {len(seeds)} seeds passed")
    return not failed


def _told_if_failed(verdict: Verdict, failed: int) -> bool:
    if not verdict.passed and failed < FAILURES_TOLD:
        say(f"seed {verdict.seed}: {verdict.failure}; see it again: just sim --seed {verdict.seed}")
    return not verdict.passed


def main() -> None:
    """Exit 0 if every seed passed, 1 if one did not."""
    options = arguments()
    if options.plant:
        PLANTS[options.plant](setattr)
    if options.seed is not None:
        passed = replay(options.seed)
    else:
        passed = play_all(range(options.first_seed, options.first_seed + options.seeds), options.jobs)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
