"""``grpo-node presets``: the named losses, their numbers and their papers."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def presets(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, every number resolved.")] = False,
) -> None:
    """List the loss presets that a run file may name, with their numbers and papers."""
    from protocol.presets import PRESETS, loss_settings
    from protocol.runspec import LossSpec, SamplingSpec

    length = SamplingSpec.model_fields["max_new_tokens"].default
    resolved = {name: LossSpec(**loss_settings(name, {}, length)) for name in PRESETS}
    if as_json:
        print(json.dumps({name: loss.model_dump() for name, loss in resolved.items()}))
        return
    defaults = LossSpec()
    for name, preset in PRESETS.items():
        print(f"{name}  ({preset.paper})")
        for setting, value in resolved[name]:
            if value != getattr(defaults, setting):
                print(f"    {setting} = {json.dumps(value)}")
        if preset.remark:
            print(f"    # {preset.remark}")
