"""Options of ``grpo-node --role …``, each with its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from node.settings import ROLES

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
    typer.Option(
        help="This node may import this module for a run: a reward, tool or environment. May be repeated."
    ),
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
