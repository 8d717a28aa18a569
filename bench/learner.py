"""How fast is a learner's step, and how much memory does it take, beside TRL and beside plain PEFT?

The same batch, adapter and objective in three arms, each in processes of its own and in turn, so that noise
hits all: ``ours`` (``TorchPolicy.step``), ``padded`` (PEFT, a padded batch a group, full logits, autograd)
and ``trl`` (GRPOTrainer 1.16; ``bench/trl/README.md`` makes its environment). Two more tell how much is the
batch: ``row_by_row`` is ``padded`` with one row at a time, so without padding, and ``trl_lean`` is TRL at its
leanest, one row at a time with activations recomputed. Loss and gradient norm of all arms must agree to 1e-4
(or to fp32 rounding, 1e-6). Sampling is not part of it.

    python -m bench.learner --trl-python trl-venv/bin/python
    python -m bench.learner --sweep          try micro-batch sizes first; ours and TRL use their fastest
    python -m bench.learner --profile        also how far we are from what the machine can do
    python -m bench.learner --quick          a tiny model, to see that the bench works

``mixed`` is 2 groups of 8 rows, prompts of 128 and completions of 32 to 256 tokens; ``long_prompt`` has
prompts of 1,024 and completions of 64. All their advantages are non-zero. ``binary`` is ``mixed`` with
rewards of 0 and 1, one of its two groups without spread: the everyday case, reported but no goal. A token
counts as trained in every row. Memory is the peak during the step above what is held after loading the model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import Figure, Goal, report, say
from bench.steps.arm import ArmResult
from bench.steps.batch import StepBatch

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / ".grpo/models/smollm2-135m-instruct"
"""Where ``examples/smollm2.py`` puts it."""

MODULES = {
    "ours": "bench.steps.ours",
    "padded": "bench.steps.plain",
    "row_by_row": "bench.steps.plain",
    "trl": "bench.trl.arm",
    "trl_lean": "bench.trl.arm",
}
CASES = ("mixed", "long_prompt", "binary")
QUICK_CASES = ("quick", "quick_binary")

SIZES = {
    "mixed": {"ours": 1024, "trl": 2},
    "long_prompt": {"ours": 2048, "trl": 1},
    "binary": {"ours": 1024, "trl": 2},
    "quick": {"ours": 64, "trl": 4},
    "quick_binary": {"ours": 64, "trl": 4},
}
"""Micro-batch of each arm, in rows (ours: tokens): the fastest of ``SWEPT`` where we measured."""
FIXED = {"padded": 8, "row_by_row": 1, "trl_lean": 1}
"""The same for the arms that are defined by it; 8 rows are one group."""
SWEPT = {"ours": (512, 1024, 2048, 4096), "trl": (1, 2, 4, 8)}

AGREE, ROUNDING = 1e-4, 1e-6
"""Loss and gradient norm of the arms: relative, and what fp32 may lose of a mean of terms near 1.

Advantages of a group sum to 0, so a loss before the first update is that mean's small remainder.
"""


def arguments() -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's directory; else SmolLM2-135M or its shape")
    parser.add_argument("--trl-python", type=Path, help="the Python of TRL's environment")
    parser.add_argument("--arms", nargs="*", default=["ours", "padded", "trl"], choices=list(MODULES))
    parser.add_argument("--cases", nargs="*", choices=CASES + QUICK_CASES, help="all without it")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each arm")
    parser.add_argument("--steps", type=int, default=1, help="measured steps of a process")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="look for each arm's fastest micro-batch first")
    parser.add_argument("--profile", action="store_true", help="ceiling of the machine, and operators")
    parser.add_argument("--quick", action="store_true", help="a tiny model; says nothing about speed")
    parser.add_argument("--json", action="store_true", help="only the line of JSON on stdout")
    return parser.parse_args()


class Bench:
    """Runs arms as processes."""

    def __init__(self, options: argparse.Namespace, model: Path, work: Path) -> None:
        self._options, self._model, self._work = options, model, work

    def prepare(self, case: str) -> StepBatch:
        """Make the case's batch."""
        self._python(
            Path(sys.executable), "bench.steps.prepare", str(self._model), case, str(self._file(case))
        )
        return StepBatch.load(self._file(case))

    def run(self, case: str, arm: str, size: int, *, profile: bool = False) -> ArmResult:
        """One process of an arm."""
        is_trl = arm.startswith("trl")
        python = self._options.trl_python.absolute() if is_trl else Path(sys.executable)
        words = [str(self._model), str(self._file(case)), "--size", str(size)]
        words += ["--steps", str(self._options.steps), "--threads", str(self._options.threads)]
        words += ["--checkpointing"] * (arm == "trl_lean") + ["--profile"] * profile
        line = self._python(python, MODULES[arm], *words).splitlines()[-1]
        result = ArmResult(**json.loads(line))
        say(
            f"{case:12} {arm:10} {result.setting:36} {median(result.step_s):8.2f} s a step,"
            f" {median(result.cpu_s):8.2f} s of processors,"
            f" {above(result) / 2**20:6.0f} MiB above {result.loaded_bytes / 2**20:.0f}"
        )
        return result

    def fastest(self, case: str, arm: str) -> int:
        """The size of the fastest of all micro-batches tried."""
        tried = {size: min(self.run(case, arm, size).step_s) for size in SWEPT[arm]}
        return min(tried, key=lambda size: tried[size])

    def _file(self, case: str) -> Path:
        return self._work / f"{case}.safetensors"

    def _python(self, python: Path, module: str, *words: str) -> str:
        quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            [str(python), "-m", module, *words],
            cwd=ROOT,
            env=os.environ | quiet | {"CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{module} {' '.join(words)} failed:\n{done.stderr[-3000:]}")
        return done.stdout


def above(result: ArmResult) -> int:
    """Bytes that stepping takes above what is held after loading."""
    return result.peak_bytes - result.loaded_bytes


def measure(
    bench: Bench, options: argparse.Namespace, case: str, arms: Iterable[str]
) -> dict[str, list[ArmResult]]:
    """All rounds of a case, the arms in turn."""
    sizes = FIXED | SIZES[case]
    if options.sweep:
        sizes |= {arm: bench.fastest(case, arm) for arm in arms if arm in SWEPT}
    found: dict[str, list[ArmResult]] = {arm: [] for arm in arms}
    for turn in range(options.rounds):
        for arm in arms:
            profile = options.profile and arm == "ours" and turn == 0
            found[arm].append(bench.run(case, arm, sizes[arm], profile=profile))
    must_agree(case, found)
    return found


def must_agree(case: str, found: Mapping[str, list[ArmResult]]) -> None:
    """Leave if the arms did not do the same step: their speeds would say nothing."""
    for what in ("loss", "grad_norm"):
        values = {arm: value for arm, some in found.items() for r in some for value in getattr(r, what)}
        first = next(iter(values.values()))
        if not all(math.isclose(value, first, rel_tol=AGREE, abs_tol=ROUNDING) for value in values.values()):
            sys.exit(f"{case}: the arms differ in their {what}, so this measured nothing: {values}")


def figures_of(case: str, batch: StepBatch, found: Mapping[str, list[ArmResult]]) -> dict[str, Figure]:
    """Medians of a case, and its ratios to ours."""
    figures: dict[str, Figure] = {f"{case}/trained_tokens": batch.trained_tokens}
    seconds, cpu, memory = {}, {}, {}
    for arm, some in found.items():
        times = [step for result in some for step in result.step_s]
        seconds[arm], memory[arm] = median(times), median(above(result) for result in some)
        cpu[arm] = median(step for result in some for step in result.cpu_s)
        figures |= {
            f"{case}/{arm}/setting": some[0].setting,
            f"{case}/{arm}/step_s": seconds[arm],
            f"{case}/{arm}/step_s_min": min(times),
            f"{case}/{arm}/step_s_max": max(times),
            f"{case}/{arm}/step_cpu_s": cpu[arm],
            f"{case}/{arm}/trained_tokens_per_s": batch.trained_tokens / seconds[arm],
            f"{case}/{arm}/memory_mib": memory[arm] / 2**20,
            f"{case}/{arm}/loaded_mib": median(result.loaded_bytes for result in some) / 2**20,
            f"{case}/{arm}/loss": some[0].loss[0],
            f"{case}/{arm}/grad_norm": some[0].grad_norm[0],
        }
    for arm in found.keys() - {"ours"} if "ours" in found else ():
        figures[f"{case}/speed_vs_{arm}"] = seconds[arm] / seconds["ours"]
        figures[f"{case}/speed_by_cpu_vs_{arm}"] = cpu[arm] / cpu["ours"]
        figures[f"{case}/memory_vs_{arm}"] = memory["ours"] / max(1, memory[arm])
    if profile := found.get("ours") and found["ours"][0].profile:
        figures |= {f"{case}/profile/{name}": value for name, value in profile.items()}
        for needed in ("needed", "needed_shared"):
            figures[f"{case}/profile/{needed}_share_of_ceiling"] = profile[f"{needed}_s"] / seconds["ours"]
    return figures


def goals(figures: Mapping[str, Figure]) -> list[Goal]:
    """What we want to be, for whatever was measured. ``binary`` has no goal."""
    wanted: list[tuple[str, str, dict[str, Any]]] = [
        ("speed_vs_trl", "mixed/speed_vs_trl", {"at_least": 2.5}),
        ("speed_vs_trl_long_prompt", "long_prompt/speed_vs_trl", {"at_least": 5.0}),
        ("memory_vs_trl", "mixed/memory_vs_trl", {"at_most": 0.5}),
        ("speed_vs_padded", "mixed/speed_vs_padded", {"at_least": 2.5}),
        ("memory_vs_padded", "mixed/memory_vs_padded", {"at_most": 0.5}),
    ]
    found = []
    for name, figure, bound in wanted:
        if isinstance(value := figures.get(figure), float):
            found.append(Goal(name, value, **bound))
    return found


def model_for(options: argparse.Namespace, work: Path) -> Path:
    """The model that is named, or SmolLM2-135M, or one of its shape: the weights do not matter for speed."""
    if options.quick:
        from node.tiny_model import tiny_model

        return tiny_model(work, seed=0, steps=1)
    if options.model or SMOLLM2.is_dir():
        return Path(options.model or SMOLLM2).absolute()
    from bench.recompute import save_model

    say("no SmolLM2-135M here (examples/smollm2.py makes it); random weights of its shape")
    save_model(work / "model")
    return work / "model"


def main() -> None:
    """Measure case by case, then report."""
    options = arguments()
    arms = list(options.arms)
    if options.trl_python is None and any(arm.startswith("trl") for arm in arms):
        say("without TRL: bench/trl/README.md makes its environment, and --trl-python PATH names it")
        arms = [arm for arm in arms if not arm.startswith("trl")]
    figures: dict[str, Figure] = {"threads": options.threads, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options, model_for(options, Path(work)), Path(work))
        for case in options.cases or (QUICK_CASES if options.quick else CASES):
            batch = bench.prepare(case)
            figures |= figures_of(case, batch, measure(bench, options, case, arms))
    report(figures, goals(figures))


if __name__ == "__main__":
    main()
