"""mrl completion: shell completion of recipes, keys and runs. Imports slow modules only when completing."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from launcher.recipe.shipped import shipped_recipes

PROGRAMS = ("mrl", "mrl-submit")


@click.command("completion", short_help="Print the completion script for bash, zsh or fish.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of mrl and mrl-submit: commands, options, recipes, their keys, and runs.

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


def complete_recipe(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete names of shipped recipes, and files."""
    found = [CompletionItem(name) for name in shipped_recipes() if name.startswith(begun)]
    return found or [CompletionItem(begun, type="file")]


def complete_override(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete keys of a recipe, with their meanings."""
    return [
        CompletionItem(f"{key}=", help=text) for key, text in _keys(sections=False).items() if key.startswith(begun)
    ]


def complete_key(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete commands, sections of a recipe and their keys."""
    from launcher.cli.main import COMMANDS

    found = {**dict.fromkeys(COMMANDS, ""), **_keys(sections=True)}
    return [CompletionItem(name, help=text) for name, text in found.items() if name.startswith(begun)]


def _keys(sections: bool) -> dict[str, str]:
    """Keys with their meanings in one line."""
    from launcher.recipe.meaning import meanings
    from launcher.recipe.problems import known_keys
    from megatron_rl.config import RunConfig

    found = known_keys(RunConfig.model_json_schema()).items()
    texts = meanings(RunConfig)
    return {
        ".".join(path): texts.get(path, "").replace("\n", " ")
        for path, field in found
        if sections or "properties" not in field
    }


def complete_run(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """Complete names of runs, the newest first, and directories."""
    from launcher.errors import BadInput
    from launcher.runs.find import newest_first

    try:
        found = [CompletionItem(Path(entry.run_dir).name, help=entry.cluster) for entry in newest_first(begun)]
    except BadInput:  # the index cannot be read; complete directories only
        found = []
    return found or [CompletionItem(begun, type="dir")]
