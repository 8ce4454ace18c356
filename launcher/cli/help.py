"""mrl help: describe a command, a key of a recipe, or a metric."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from launcher.cli.completion import SHELLS, complete_key, completion_scripts
from launcher.cli.main import ALIASES, COMMANDS
from launcher.recipe.suggest import SYNONYMS, did_you_mean

MOST = 6  # names of each kind that a search lists
WIDTH = 100


@click.command("help", short_help="Describe a command, a key of a recipe, or a metric.")
@click.argument("name", metavar="[COMMAND|KEY|SECTION|METRIC|WORD]", required=False, shell_complete=complete_key)
@click.option("--markdown", is_flag=True, help="Print the reference of all keys, docs/keys.md.")
@click.option("--metrics", is_flag=True, help="Print the reference of all metrics, docs/metrics.md.")
@click.option("--recipes", is_flag=True, help="List the recipes that can be submitted by name. Short: mrl recipes.")
@click.option("--json", "as_json", is_flag=True, help="With --recipes: print one JSON object: {recipes: [...]}.")
@click.option(
    "--completion",
    "shell",
    type=click.Choice(SHELLS),
    help="Print the completion script of mrl and mrl-submit for a shell: commands, options, recipes, keys and runs. "
    'In ~/.bashrc: eval "$(mrl completion bash)"; in ~/.zshrc, after compinit: eval "$(mrl completion zsh)"; in '
    "~/.config/fish/config.fish: mrl completion fish | source.",
)
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    markdown: bool,
    metrics: bool,
    recipes: bool,
    as_json: bool,
    shell: str | None,
) -> None:
    """Print the help of COMMAND, or the list of commands.

    For a KEY of recipes, such as grpo.kl_beta: what it takes, its default, its meaning, and the shipped recipes that
    set it. For a SECTION, such as grpo: all of its keys. For a METRIC, such as truncated_ratio: its meaning, unit and
    good range, and what to do outside of it. For any other WORD: what has it in its name or its meaning, the nearest
    first.

    \b
    Exit codes: 0 printed  2 nothing has this name or word
    """
    if as_json and not recipes:
        raise click.UsageError("--json: only with --recipes", context)
    if shell:
        click.echo("\n".join(completion_scripts(shell)))
        return
    if recipes:
        from launcher.cli.show.lists import recipe_lines, recipes_json

        click.echo(recipes_json() if as_json else "\n".join(recipe_lines()))
        return
    from launcher.cli.show.help_pages import Keys, metrics_page  # slow to import

    if metrics:
        click.echo(metrics_page(), nl=False)
    elif markdown:
        click.echo(Keys().markdown(), nl=False)
    else:
        _describe(context, name)


def _describe(context: click.Context, name: str | None) -> None:
    """Print the help of a command, a key, a metric or a word. Raises click.UsageError where nothing has this name."""
    group = context.find_root().command
    assert isinstance(group, click.Group)
    root = click.Context(group, info_name=context.find_root().info_name)
    if name is None:
        click.echo(group.get_help(root))
        return
    from launcher.cli.show.help_pages import Keys, key_path, metric_lines, metric_texts

    keys, path = Keys(), key_path(name)
    if name not in COMMANDS and path not in keys.known and (entry := metric_lines(name)):
        click.echo("\n".join(entry))
        return
    if len(path) > 1 and path not in keys.known:
        raise click.UsageError(f"recipes have no key {name}{did_you_mean(path, keys.known)}", context)
    if not {name} & {*COMMANDS, *ALIASES} and path not in keys.known:
        commands = {command: group.get_command(root, command) for command in COMMANDS}
        texts = {command: found.get_short_help_str(200) for command, found in commands.items() if found}
        if lines := search_lines(name, {"keys": keys.texts(), "metrics": metric_texts(), "commands": texts}):
            click.echo("\n".join([*lines, "", "mrl help NAME describes one of these."]))
            return
    if name in COMMANDS or path not in keys.known:
        found, chosen, _ = group.resolve_command(root, [name])
        assert chosen is not None  # resolve_command has complained
        click.echo(chosen.get_help(click.Context(chosen, info_name=found, parent=root)))
    if name in COMMANDS and path in keys.known:
        click.echo("\nIn recipes:\n")
    if path in keys.known:
        click.echo("\n".join(keys.lines(path)))


def distance(name: str, meaning: str, word: str, meant: str) -> int | None:
    """Return how far a name is from a word: 0 for what other programs call by this word, then by whether the last part
    of the name, the name or the meaning has it; None if nothing has it."""
    if name == meant:
        return 0
    last = name.rpartition(".")[2].rpartition("/")[2]
    for place, text in enumerate((last, name, meaning), 2):
        if re.search(rf"(?<![a-z]){re.escape(word)}", text.lower()):
            return place - (text == word)
    return None


def search_lines(word: str, kinds: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names that fit a word, the nearest first; empty if there are none. `kinds`: heading -> name ->
    meaning."""
    word, lines = word.lower(), list[str]()
    meant = ".".join(SYNONYMS.get(word, ()))
    for heading, entries in kinds.items():
        near = {name: distance(name, meaning, word, meant) for name, meaning in entries.items()}
        ranked = sorted((name for name in near if near[name] is not None), key=lambda name: near[name] or 0)
        if not ranked:
            continue
        lines += ["", f"{heading}:"]
        width = max(map(len, ranked[:MOST]))
        for name in ranked[:MOST]:
            text = f"  {name:<{width}}  {' '.join(entries[name].split())}"
            lines.append(text if len(text) <= WIDTH else f"{text[: WIDTH - 1].rstrip()}…")
        if len(ranked) > MOST:
            lines.append(f"  and {len(ranked) - MOST} more")
    return lines[1:]
