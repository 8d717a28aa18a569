"""The ``verifiers:<environment>`` reward: what the environment's own task says of a rollout, weights and all.

The task is the one that the row was read from, found by its number and recognised by its content. It scores a
trace, as the library calls a conversation: the prompt, then all turns and what tools or a user said between
them. The value is the trace's reward, the sum of the task's rewards times their weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from protocol.reasons import Unscorable
from roles.tasks.environment import Environment
from roles.tasks.environment_rows import ENVIRONMENT, HASH, INDEX
from roles.verifier.rewards.reward import Item, Score


class EnvironmentReward:
    """Scores with the task that a row comes from."""

    def __init__(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Open the environment. ``arguments`` are those that its tasks were read with.

        Raises OperatorError if it, or the library, is not installed, or if it does not take them.
        """
        self._environment = Environment(name, arguments)

    def prepare(self) -> None:
        """Load the first task, and with it what is slow at first."""
        self._environment.task(0)

    async def score(self, item: Item) -> Score:
        """The trace's reward. NO_ANSWER for a row of another environment; raises what the task raises."""
        metadata = item.metadata
        if metadata.get(ENVIRONMENT) != self._environment.name:
            return Score.none(
                Unscorable.NO_ANSWER, f"the row is no task of verifiers:{self._environment.name}"
            )
        task = self._environment.task(metadata[INDEX])
        if task is None or task.hash != metadata[HASH]:
            return Score.none(
                Unscorable.NO_ANSWER,
                f"task {metadata[INDEX]} is another one each time the environment is opened",
            )
        if needed := [fn.__name__ for fn in task.hooks("reward") if _needs_runtime(fn)]:
            return Score.none(Unscorable.REWARD_FAILED, f"reward {needed[0]} needs the library's runtime")
        trace = trace_of(task, item)
        await task.score(trace)
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not trace.rewards:
            return Score.none(Unscorable.REWARD_FAILED, f"no score of {', '.join(missing) or 'any reward'}")
        return Score(float(trace.reward))


def trace_of(task: Any, item: Item) -> Any:
    """The library's record of a conversation that was sampled elsewhere."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask

    said = item.conversation or [{"role": "assistant", "content": item.completion}]
    nodes = [MessageNode(message=message) for message in prompt_messages(task.data)]
    nodes += [MessageNode(message=_typed(one), sampled=one["role"] == "assistant") for one in said]
    for index, node in enumerate(nodes[1:]):
        node.parent = index
    trace = Trace(
        task=TraceTask(type=type(task).__name__, data=task.data, hash=task.hash, key=task.key),
        agent=AgentInfo(config=AgentConfig()),
        state=state_cls(type(task))(),
        nodes=nodes,
    )
    trace.is_completed = trace.ok = True
    return trace


def prompt_messages(data: Any) -> list[Any]:
    """What the policy was asked, as the library's messages."""
    from verifiers.v1.types import SystemMessage, UserMessage

    messages: list[Any] = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    return (
        [*messages, UserMessage(content=data.prompt)]
        if isinstance(data.prompt, str)
        else [*messages, *data.prompt]
    )


def _typed(message: Any) -> Any:
    from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage, UserMessage

    if message["role"] == "tool":
        return ToolMessage(tool_call_id=message["tool_call_id"], content=message["content"])
    if message["role"] == "user":
        return UserMessage(content=message["content"])
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return AssistantMessage(content=message["content"], tool_calls=calls or None)


def _needs_runtime(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty
