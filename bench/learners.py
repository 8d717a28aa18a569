"""Does a second (fourth) learner help, and under which rules?

All roles and the model are real; time is virtual, and a learner's step takes one second of it. So one, two
and four learners are compared on one core: at equal seconds, and at equal groups consumed. What an arm is
says ``Arm``; the reward is the exact probability of right answers to held-out problems (``Exam``).

    python -m bench.learners --out learners.jsonl        the whole campaign; run it again to go on
    python -m bench.learners --arms 'four*' --seeds 0    some of it
    python -m bench.learners --list
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from fnmatch import fnmatch
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from bench.emulation.arm import (
    Arm,
    Result,
    groups_of_one,
    largest_dip,
    level_at,
    mean_over,
    reached,
    run_arm,
)
from bench.harness import Figure, Goal, report, say
from node.settings import prepare_process

UPDATES = 100
SEEDS = (0, 1, 2)
REWARD = 0.8
"""The table says when it is reached."""

ONE, TWO, FOUR = Arm("one"), Arm("two", learners=2), Arm("four", learners=4)
SUM = replace(FOUR, name="four-sum", weight=1.0)
ARMS = (
    ONE,
    replace(ONE, name="one-rate0.5", rate=0.5),
    replace(ONE, name="one-rate2", rate=2.0),
    replace(ONE, name="one-every4", publish_every=4),
    replace(ONE, name="one-batch4", batch=4),
    replace(ONE, name="one-batch4-rate2", batch=4, rate=2.0),
    TWO,
    replace(TWO, name="two-every4", publish_every=4),
    replace(TWO, name="two-sum", weight=1.0),
    FOUR,
    replace(FOUR, name="four-every4", publish_every=4),
    replace(FOUR, name="four-every10", publish_every=10),
    replace(FOUR, name="four-rate2", rate=2.0),
    replace(FOUR, name="four-rate4", rate=4.0),
    replace(FOUR, name="four-every4-rate2", publish_every=4, rate=2.0),
    replace(FOUR, name="four-root", weight=0.5),
    SUM,
    replace(SUM, name="four-sum-every4", publish_every=4),
    replace(SUM, name="four-sum-every10", publish_every=10),
    replace(SUM, name="four-sum-rate0.25", rate=0.25),
    replace(SUM, name="four-sum-rate2", rate=2.0),
    replace(SUM, name="four-sum-stale16", max_staleness=16),
    replace(FOUR, name="four-free", causal=False),
    replace(FOUR, name="four-late", late=3.0),
    replace(FOUR, name="four-late-free", late=3.0, causal=False),
    replace(FOUR, name="four-every4-free", publish_every=4, causal=False),
    replace(FOUR, name="four-every4-late", publish_every=4, late=3.0),
    replace(FOUR, name="four-every4-late-free", publish_every=4, late=3.0, causal=False),
    replace(FOUR, name="four-late-rate2", late=3.0, rate=2.0),
    replace(FOUR, name="four-late-free-rate2", late=3.0, rate=2.0, causal=False),
    replace(TWO, name="two-late", late=3.0),
    replace(TWO, name="two-late-free", late=3.0, causal=False),
)


def arguments() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arms", nargs="*", default=["*"], help="names or patterns; see --list")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--updates", type=int, default=UPDATES, help="steps that one learner has time for")
    parser.add_argument(
        "--out", type=Path, help="JSON lines: results are added, and what is there is not run"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--list", action="store_true", help="only list the arms")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


def stored(file: Path | None) -> list[Result]:
    """The results in a file; a line that was cut off does not count."""
    if file is None or not file.exists():
        return []
    lines = file.read_text("utf-8").splitlines()
    return [Result(**json.loads(line)) for line in lines if line.endswith("}")]


def campaign(
    wanted: Sequence[tuple[Arm, int]], updates: int, jobs: int, out: Path | None
) -> Iterator[Result]:
    """Run what is wanted, each in a process of its own; gives results as they come."""
    # Spawned: a forked child of a process that has used torch may hang.
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        began = time.monotonic()
        work = {pool.submit(run_arm, arm, seed, updates): (arm, seed) for arm, seed in wanted}
        for number, done in enumerate(as_completed(work), start=1):
            result = done.result()
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
            left_s = (time.monotonic() - began) / number * (len(work) - number)
            arm, seed = work[done]
            reward = result.curve[-1][3]
            say(f"{number}/{len(work)} {arm.name} seed {seed}: {reward:.3f}; {left_s / 60:.0f} minutes left")
            yield result


def table(results: Sequence[Result], arms: Sequence[Arm], updates: int) -> dict[str, Figure]:
    """One row an arm on stderr, means over the seeds; returns the figures."""
    figures: dict[str, Figure] = {}
    say(
        f"{'arm':22} {'seeds':>5} {'at equal seconds':>18} {'at equal groups':>18} {f's to {REWARD}':>8}"
        f" {'groups':>7} {'dip':>5} {'steps':>6} {'stale':>6} {'age':>5} {'lag':>5}"
    )
    for arm in arms:
        some = [result for result in results if result.arm == asdict(arm)]
        if not some:
            continue
        groups = groups_of_one(asdict(arm), updates)
        at_end, spread = mean_over(some, lambda result: level_at(result, 0, updates))
        at_groups, groups_spread = mean_over(some, partial(level_at, axis=1, end=groups))
        row = {
            "reward_at_equal_seconds": at_end,
            "reward_at_equal_groups": at_groups,
            "seconds_to_reward": mean_over(some, lambda result: reached(result, 0, REWARD))[0],
            "groups_to_reward": mean_over(some, lambda result: reached(result, 1, REWARD))[0],
            "largest_dip": mean_over(some, largest_dip)[0],
            "steps": mean_over(some, lambda result: result.steps)[0],
            "groups_dropped": mean_over(some, lambda result: sum(result.dropped.values()))[0],
            "age_trained": mean_over(some, lambda result: result.staleness)[0],
            "lag": mean_over(some, lambda result: result.lag)[0],
        }
        figures |= {f"{arm.name}/{name}": value for name, value in row.items()}
        v = list(row.values())
        say(
            f"{arm.name:22} {len(some):5} {at_end:11.3f} ±{spread:.3f} {at_groups:12.3f} ±{groups_spread:.3f}"
            f" {v[2]:8.0f} {v[3]:7.0f} {v[4]:5.2f} {v[5]:6.0f} {v[6]:6.0f} {v[7]:5.1f} {v[8]:5.1f}"
        )
    return figures


def goals(figures: dict[str, Figure]) -> list[Goal]:
    """What the defaults promise: more learners learn more in the same time."""
    found = []
    for more in ("two", "four", "four-every4"):
        gain = [figures.get(f"{name}/reward_at_equal_seconds") for name in (more, "one")]
        if isinstance(gain[0], float) and isinstance(gain[1], float):
            found.append(Goal(f"gain_of_{more}", gain[0] - gain[1], at_least=0.0))
    return found


def main() -> None:
    """Run what is not there yet, then report on everything that was asked for."""
    options = arguments()
    prepare_process(1)
    arms = [arm for arm in ARMS if any(fnmatch(arm.name, pattern) for pattern in options.arms)]
    if options.list:
        for arm in arms:
            say(f"{arm.name:22} {json.dumps({k: v for k, v in asdict(arm).items() if k != 'name'})}")
        return
    there = stored(options.out)
    asked = [(arm, seed) for seed in options.seeds for arm in arms]
    wanted = [(a, s) for a, s in asked if not any(result.is_of(a, s, options.updates) for result in there)]
    say(f"{len(wanted)} runs of {len(asked)}; the others are there")
    there += campaign(wanted, options.updates, options.jobs, options.out)
    results = [r for r in there if any(r.is_of(a, s, options.updates) for a, s in asked)]
    figures = table(results, arms, options.updates)
    report(figures, goals(figures))


if __name__ == "__main__":
    main()
