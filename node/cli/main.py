"""The command line: ``grpo-node --role … --run …`` plays roles; the commands make and watch runs.

Whatever a person gets wrong is answered with one line on standard error and exit code 2.
"""

from __future__ import annotations

import sys
from typing import cast

import typer

from node.cli import (
    adapters_command,
    audit_command,
    broker_command,
    demo_command,
    invite_command,
    jobs_command,
    presets_command,
    recover_command,
    run_commands,
)
from node.cli import node_options as options
from node.runtime import EXIT_IMPATIENT, EXIT_OPERATOR, explain
from node.settings import ROWS_MAX
from node.telemetry import set_up_logs
from protocol.errors import OperatorError

HELP = """Reinforcement learning of language models by a swarm of equal peers.

See it work:          [bold]grpo-node demo[/bold]
Train on one machine: [bold]grpo-node up examples/smollm2-arithmetic.toml[/bold]
Train on many:        [bold]grpo-node create RUN.toml --broker URL[/bold], then anywhere, any number:
                      [bold]grpo-node --role sampler --run NAME --broker URL[/bold]
With other people:    [bold]grpo-node broker --listen HOST:PORT[/bold], then for each of them:
                      [bold]grpo-node invite --role sampler --run NAME[/bold]
"""

app = typer.Typer(
    name="grpo-node",
    help=HELP,
    rich_markup_mode="rich",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("demo")(demo_command.demo)
app.command("up")(run_commands.up)
app.command("create")(run_commands.create)
app.command("status")(run_commands.status)
app.command("presets")(presets_command.presets)
app.command("recover")(recover_command.recover)
app.command("broker")(broker_command.broker)
app.command("invite")(invite_command.invite)
app.command("invitations")(invite_command.invitations)
app.command("revoke")(invite_command.revoke)
app.command("calibrate")(audit_command.calibrate)
app.add_typer(adapters_command.app, name="adapters")
app.add_typer(jobs_command.app, name="jobs")
app.add_typer(audit_command.app, name="audit")


@app.callback(invoke_without_command=True)
def node(
    context: typer.Context,
    role: options.RoleOption = None,
    run: options.RunOption = None,
    broker: run_commands.BrokerOption = None,
    token: run_commands.TokenOption = None,
    name: options.NameOption = None,
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    rows: options.RowsOption = ROWS_MAX,
    engine: options.EngineOption = None,
    vllm_command: options.VllmCommandOption = None,
    vllm_url: options.VllmUrlOption = None,
    vllm_adapters: options.VllmAdaptersOption = None,
    grace: options.GraceOption = 30.0,
    allow_module: options.AllowModuleOption = None,
    wait: options.WaitOption = False,
    log: options.LogOption = "info",
    join: options.JoinOption = None,
    allow_path: options.AllowPathOption = None,
    version: options.VersionOption = False,
) -> None:
    """Play one or more roles of a run."""
    if version:
        from importlib.metadata import version as installed

        print(f"grpo-node {installed('grpo-node')}")
        raise typer.Exit
    if context.invoked_subcommand is not None:
        if role or run or name or join:
            raise OperatorError("--role, --run, --name and --join play a role; they do not go with a command")
        return
    run_commands.play(
        roles=tuple(role or ()),
        run=run,
        broker=broker,
        token=token,
        name=name,
        device=device,
        threads=threads,
        sampler=options.SamplerOptions.of(rows, engine, vllm_command, vllm_url, vllm_adapters),
        grace_s=grace,
        log_level=log,
        allow_modules=tuple(allow_module or ()),
        wait=wait,
        join=join,
        allowed_paths=tuple(allow_path or ()),
    )


# Typer may carry a click of its own, so click's exceptions are reached through the one typer exports.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    set_up_logs("warning")  # a command that says more sets them up again
    try:
        code = app(args=arguments, standalone_mode=False)
    except typer.Abort:
        sys.exit(EXIT_IMPATIENT)
    except UsageError as exc:
        if type(exc).__name__ == "NoArgsIsHelpError":
            print(exc.format_message())
            sys.exit(EXIT_OPERATOR)
        where = exc.ctx.command_path if exc.ctx else "grpo-node"
        print(f"grpo-node: {exc.format_message()} (see: {where} --help)", file=sys.stderr)
        sys.exit(EXIT_OPERATOR)
    except SystemExit:
        raise
    except BaseException as exc:  # noqa: BLE001 explained in one place, never swallowed
        sys.exit(explain(exc))
    sys.exit(code if isinstance(code, int) else 0)
