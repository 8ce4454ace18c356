"""mrl: all commands around a run except its submission. Each is a module here, loaded when it is used."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

import click

COMMANDS = {
    "attach": "exec shell ssh",
    "cancel": "abort delete end kill rm scancel stop",
    "chat": "generate talk",
    "compare": "diff sweep versus vs",
    "completion": "",
    "convert": "export",
    "doctor": "",
    "environments": "",
    "evaluate": "benchmark eval score test",
    "explain": "debug diagnose why",
    "fork": "",
    "help": "",
    "logs": "log output tail",
    "ls": "list ps runs squeue",
    "plan": "dry-run estimate simulate",
    "prefetch": "download fetch pull",
    "recipes": "",
    "rehearse": "",
    "report": "dashboard html page view",
    "requeue": "",
    "resume": "continue restart",
    "rollouts": "answers completions generations samples",
    "rows": "data dataset examples inspect preview",
    "serve": "",
    "serve-agent": "",
    "status": "info show state",
}
"""Modules of launcher.cli (with _ for -) that hold a click command named `command` -> its names in other programs."""
START = "mrl-submit starts a run"
SUBMIT_SYNONYMS = "grpo launch new rl run sbatch start submit train"
"""Names of mrl-submit in other programs."""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = import_module(f"launcher.cli.{name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"there is no command {args[0]!r}; {_hint(args[0])}", ctx)
        return super().resolve_command(ctx, args)


def _hint(word: str) -> str:
    if word in SUBMIT_SYNONYMS.split() or "submit".startswith(word[:3]):
        return START
    meant = [name for name, words in COMMANDS.items() if word in words.split()]
    if close := meant or get_close_matches(word, COMMANDS, n=1):
        return f"did you mean {close[0]}?"
    return f"the commands are {', '.join(sorted(COMMANDS))}; {START}"


@click.command(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(package_name="mrl", message="%(prog)s %(version)s")
@click.pass_context
def main(context: click.Context) -> None:
    """GRPO post-training of Megatron models: watch, control and evaluate runs. `mrl-submit` starts them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
