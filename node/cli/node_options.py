"""Options of ``grpo-node --role …``, each with its help; those of a sampler are ``up``'s as well."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

import typer

from node.settings import ROLES, ROWS_MAX, EngineKind, VllmSettings, checked_engine

RoleOption = Annotated[
    list[str] | None, typer.Option(help=f"Role to play: {', '.join(ROLES)}. May be repeated.")
]
RunOption = Annotated[str | None, typer.Option(help="Name of the run to join.")]
NameOption = Annotated[
    str | None,
    typer.Option(help="Name of this node; a learner that keeps its name continues where it stopped."),
]
DeviceOption = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1, mps; a learner: also cuda:0,cuda:1.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(help="CPU threads; default: what is free on this machine.")
]
RowsOption = Annotated[int, typer.Option(help="Sequences that a sampler decodes at once.")]
EngineOption = Annotated[
    str | None,
    typer.Option(
        help="What a sampler generates with: transformers or vllm. "
        "[default: vllm with a --vllm option, else transformers]",
        show_default=False,
    ),
]
VllmCommandOption = Annotated[
    str | None,
    typer.Option(help="What starts a vLLM server; model and flags are added.", show_default=False),
]
VllmUrlOption = Annotated[
    list[str] | None,
    typer.Option(help="A vLLM server that runs already. May be repeated.", show_default=False),
]
VllmAdaptersOption = Annotated[
    Path | None,
    typer.Option(help="Directory that the vLLM server sees, too, under this very path.", show_default=False),
]
GraceOption = Annotated[float, typer.Option(help="Seconds to finish work in hand when stopped.")]
AllowModuleOption = Annotated[
    list[str] | None,
    typer.Option(help="May be imported for a run: a reward, tool, user or environment. May be repeated."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait", help="Wait for a run that the broker does not have (yet).")
]
LogOption = Annotated[str, typer.Option(help="debug, info, warning or error.")]
JoinOption = Annotated[
    str | None, typer.Option(help="An invitation: broker, run, role and login in one word. [env: GRPO_JOIN]")
]
AllowPathOption = Annotated[
    list[Path] | None, typer.Option(help="Directory that the run of an invitation may name. May be repeated.")
]
VersionOption = Annotated[bool, typer.Option("--version", help="Show the version and exit.")]


@dataclass(frozen=True, slots=True)
class SamplerOptions:
    """What a person said about a sampler."""

    rows: int
    engine: EngineKind
    vllm: VllmSettings

    @classmethod
    def of(
        cls,
        rows: int = ROWS_MAX,
        engine: str | None = None,
        command: str | None = None,
        urls: list[str] | None = None,
        adapters: Path | None = None,
    ) -> Self:
        """From the options as they were given. Raises OperatorError if they contradict each other."""
        vllm = VllmSettings(command, tuple(urls or ()), adapters)
        return cls(rows, checked_engine(engine or ("vllm" if vllm.said else "transformers"), vllm), vllm)

    @property
    def words(self) -> tuple[str, ...]:
        """The same options again, for a sampler that this process starts."""
        words = ["--rows", str(self.rows), "--engine", self.engine]
        if self.vllm.command is not None:
            words += ["--vllm-command", self.vllm.command]
        for url in self.vllm.urls:
            words += ["--vllm-url", url]
        if self.vllm.adapters is not None:
            words += ["--vllm-adapters", str(self.vllm.adapters)]
        return tuple(words)
