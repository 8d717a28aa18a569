"""What a person sees while a swarm works: a live panel in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from node.progress import curve
from node.runtime import EXIT_IMPATIENT, explain
from node.swarm import Swarm

LINE_EVERY_S = 5.0

T = TypeVar("T")
Show = Callable[[Swarm], None]


class Shower:
    """Shows a swarm on standard error: redrawn in place, or as lines where that is not possible."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._last_line = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(f"[bold cyan]·[/] {text}", highlight=False, soft_wrap=True)

    def show(self, swarm: Swarm) -> None:
        """The swarm as it is now."""
        if self._live is not None:
            self._live.update(panel(swarm))
        elif time.monotonic() - self._last_line >= LINE_EVERY_S and swarm.progress.rewards:
            self._last_line = time.monotonic()
            self._console.print(swarm.progress.line(swarm.alive), highlight=False, soft_wrap=True)


def panel(swarm: Swarm) -> Panel:
    """Reward curve, numbers and peers."""
    progress = swarm.progress
    if not progress.rewards:
        return Panel("peers are loading; the first groups are being sampled", title="grpo-node")
    numbers = Table.grid(padding=(0, 3))
    held_out = f"{progress.evals[-1][1]:.3f}" if progress.evals else "…"
    numbers.add_row(
        f"update [bold]{progress.version:.0f}[/]/{progress.updates_wanted}",
        f"reward [bold]{progress.reward:.3f}[/]",
        f"held-out [bold]{held_out}[/]",
        f"staleness {progress.staleness_mean:.1f}, max {progress.staleness_max:.0f}",
        f"groups in flight {progress.in_flight}",
    )
    plot = Text("\n".join(curve(progress.rewards)), style="green")
    alive = Text("alive: " + ", ".join(swarm.alive), style="dim")
    return Panel(Group(numbers, plot, alive), title=f"grpo-node · run {swarm.spec.name}")


def run_shown(work: Callable[[Shower], Coroutine[Any, Any, T]], *, as_json: bool, when_stopped: str) -> T:
    """Run ``work`` with somebody to show progress to; Ctrl-C stops it in order and says ``when_stopped``."""
    console = Console(stderr=True, quiet=False, force_terminal=False if as_json else None)

    async def main() -> T:
        with Shower(console) as shower:
            return await work(shower)

    try:
        return asyncio.run(main())
    except KeyboardInterrupt:
        console.print(f"stopped; {when_stopped}")
        sys.exit(EXIT_IMPATIENT)
    except BaseException as exc:  # noqa: BLE001 explained in one place, never swallowed
        sys.exit(explain(exc))
