"""Which rewards there are: a name in a run file becomes a reward function here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from protocol.errors import OperatorError, one_line
from protocol.runspec import RewardSpec
from roles.tasks.environment import environment_module
from roles.verifier.rewards.exact import ExactReward
from roles.verifier.rewards.reward import GroupReward, Reward

KINDS = (
    "exact, math, code, reasoning-gym:<dataset>, verifiers:<environment>, and module:function for your own"
)


NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
"""Of a run whose environment has none, or that has no environment."""


class Place(StrEnum):
    """Where a reward runs, by what it may meet."""

    INLINE = "inline"
    """In the node: it cannot hang."""
    LOCKED = "locked"
    """In a confined worker that starts nothing: its libraries may trip over a completion."""
    LAUNCHER = "launcher"
    """In a worker without network or files, which starts a confined process for each completion."""
    LOADED = "loaded"
    """In a confined worker, of code that the operator chose and that was loaded with its rights."""
    OPEN = "open"
    """In a worker with the operator's own rights: code that the operator chose."""

    @property
    def confined(self) -> bool:
        """Whether its processes leave network and files behind."""
        return self in {Place.LOCKED, Place.LAUNCHER, Place.LOADED}


_PLACES = {
    "exact": Place.INLINE,
    "math": Place.LOCKED,
    "code": Place.LAUNCHER,
    "reasoning-gym": Place.LOCKED,
    "verifiers": Place.LOADED,
}
"""By what stands before the colon; everything else is OPEN."""


_PREFIXES = frozenset({"reasoning-gym", "verifiers"})
"""What stands before a colon and is no module of a person's own."""


def place_of(name: str) -> Place:
    """Where the reward of this name runs."""
    return _PLACES.get(name.partition(":")[0], Place.OPEN)


def user_modules(specs: Sequence[RewardSpec]) -> list[str]:
    """Modules of a person's own, and environments, that these rewards import."""
    named = [spec.name.partition(":") for spec in specs]
    own = {module for module, colon, _ in named if colon and module not in _PREFIXES}
    return sorted(own | {environment_module(name) for kind, _, name in named if kind == "verifiers"})


def refuse_foreign(specs: Sequence[RewardSpec], allowed: Sequence[str]) -> None:
    """Raises OperatorError if a reward would import a module that the node's operator has not allowed.

    Whoever writes a run file must not decide what code runs on other people's machines. A package allows the
    modules in it.
    """
    for module in user_modules(specs):
        refuse_module(module, allowed, "a reward", "verifier")


def refuse_module(module: str, allowed: Sequence[str], what: str, role: str) -> None:
    """The same for one module of any role."""
    if not any(module == one or module.startswith(f"{one}.") for one in allowed):
        shown = one_line(module, 120)
        raise OperatorError(
            f"{what} of this run is code of module {shown!r}; if you trust it, start the {role} "
            f"with --allow-module {shown}"
        )


def single_use(name: str) -> bool:
    """Whether a worker scores one completion and is replaced: what it evaluated could have changed it."""
    return name.startswith("reasoning-gym:")


def open_reward(
    spec: RewardSpec, arguments: Mapping[str, Any] = NO_ARGUMENTS, *, isolated: bool = False
) -> Reward | GroupReward:
    """Make the reward; raises OperatorError when there is none of that name or it cannot be imported.

    Heavy imports happen here: call it in a worker's template for everything that is not ``INLINE``.
    ``arguments`` (``tasks.arguments``) are those that an environment's tasks were read with.
    ``isolated`` tells that this process has left network and files behind.
    """
    kind, _, name = spec.name.partition(":")
    if spec.name == "exact":
        return ExactReward()
    if spec.name == "math":
        from roles.verifier.rewards.math import MathReward

        return MathReward()
    if spec.name == "code":
        from roles.verifier.rewards.code import CodeReward

        return CodeReward(spec, isolated=isolated)
    if kind == "reasoning-gym" and name:
        from roles.verifier.rewards.reasoning_gym import ReasoningGymReward

        return ReasoningGymReward(name)
    if kind == "verifiers":
        from roles.verifier.rewards.environment import EnvironmentReward

        return EnvironmentReward(name, arguments)
    if ":" in spec.name:
        from roles.verifier.rewards.user_function import opened

        return opened(spec.name)
    raise OperatorError(f"reward {spec.name!r}: there are {KINDS}")
