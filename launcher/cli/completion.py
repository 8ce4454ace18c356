"""mrl completion: what a shell needs to complete mrl and mrl-submit."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAMS = ("mrl", "mrl-submit")


@click.command("completion", short_help="Print what bash, zsh or fish need to complete mrl.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion of mrl and mrl-submit: commands, options, recipes, their keys, and runs.

    \b
    In ~/.bashrc:  eval "$(mrl completion bash)"
    In ~/.zshrc:   eval "$(mrl completion zsh)"     (after compinit)
    In ~/.config/fish/config.fish:  mrl completion fish | source
    Exit codes: 0 printed  2 bad usage
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click ships both
    for program in PROGRAMS:
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        source = kind(click.Command(program), {}, program, variable)
        click.echo(source.source_template % source.source_vars())
