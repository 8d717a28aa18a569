"""Which rewards there are: a name in a run file becomes a reward function here, and nowhere else."""

from __future__ import annotations

from protocol.errors import OperatorError
from protocol.runspec import RewardSpec
from roles.verifier.rewards.exact import ExactReward
from roles.verifier.rewards.reward import Reward

INLINE = frozenset({"exact"})
"""Rewards that cannot hang and run in the node; all others run in killable workers."""


def open_reward(spec: RewardSpec) -> Reward:
    """Make the reward; raises OperatorError when there is none of that name or it cannot be imported.

    Heavy imports happen here: call it in a worker for everything that is not ``INLINE``.
    """
    if spec.name == "exact":
        return ExactReward()
    if spec.name == "math":
        from roles.verifier.rewards.math import MathReward

        return MathReward()
    if ":" in spec.name:
        from roles.verifier.rewards.user_function import UserFunction

        return UserFunction(spec.name)
    raise OperatorError(f"reward {spec.name!r}: there are exact, math, and module:function for your own")
