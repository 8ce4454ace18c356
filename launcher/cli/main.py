"""mrl: everything around a run but its submission. Each command is one file here, loaded when it is used."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

import click

COMMANDS = (
    "attach",
    "cancel",
    "chat",
    "completion",
    "convert",
    "doctor",
    "environments",
    "evaluate",
    "fork",
    "help",
    "logs",
    "ls",
    "plan",
    "prefetch",
    "recipes",
    "rehearse",
    "requeue",
    "resume",
    "serve",
    "serve-agent",
    "status",
)
"""Modules of launcher.cli (with _ for -) that hold a click command named `command`."""


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
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(sorted(COMMANDS))}"
            if "submit".startswith(args[0][:3]):
                hint = "mrl-submit starts a run"
            raise click.UsageError(f"no command is called {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="mrl", message="%(prog)s %(version)s")
def main() -> None:
    """GRPO post-training of Megatron models: look after runs. `mrl-submit` starts them."""
