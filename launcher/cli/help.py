"""mrl help: describe a command, a key of a recipe, or a metric."""

from __future__ import annotations

import click

from launcher.cli.completion import complete_key
from launcher.cli.main import COMMANDS


@click.command("help", short_help="Describe a command, a key of a recipe, or a metric.")
@click.argument("name", metavar="[COMMAND|KEY|SECTION|METRIC|WORD]", required=False, shell_complete=complete_key)
@click.option("--markdown", is_flag=True, help="Print the reference of all keys, docs/keys.md.")
@click.option("--metrics", is_flag=True, help="Print the reference of all metrics, docs/metrics.md.")
@click.pass_context
def command(context: click.Context, name: str | None, markdown: bool, metrics: bool) -> None:
    """Print the help of COMMAND, or the list of commands.

    For a KEY of recipes, such as grpo.kl_beta: what it takes, its default, its meaning, and the shipped recipes that
    set it. For a SECTION, such as grpo: all of its keys. For a METRIC, such as truncated_ratio: its meaning, unit and
    good range, and what to do outside of it. For any other WORD: what has it in its name or its meaning, the nearest
    first.

    \b
    Exit codes: 0 printed  2 nothing has this name or word
    """
    if metrics:
        from launcher.cli.show.metrics import metrics_page

        click.echo(metrics_page(), nl=False)
        return
    if markdown:
        from launcher.cli.show.keys import Keys

        click.echo(Keys().markdown(), nl=False)
        return
    group = context.find_root().command
    assert isinstance(group, click.Group)
    root = click.Context(group, info_name=context.find_root().info_name)
    if name is None:
        click.echo(group.get_help(root))
        return
    from launcher.cli.show.keys import Keys, key_path  # slow to import
    from launcher.cli.show.metrics import metric_lines, metric_texts
    from launcher.recipe.suggest import did_you_mean

    keys, path = Keys(), key_path(name)
    if name not in COMMANDS and path not in keys.known and (entry := metric_lines(name)):
        click.echo("\n".join(entry))
        return
    if len(path) > 1 and path not in keys.known:
        raise click.UsageError(f"recipes have no key {name}{did_you_mean(path, keys.known)}", context)
    if name not in COMMANDS and path not in keys.known:
        from launcher.cli.show.search import search_lines

        commands = {command: group.get_command(root, command) for command in COMMANDS}
        texts = {command: found.get_short_help_str(200) for command, found in commands.items() if found}
        if lines := search_lines(name, {"keys": keys.texts(), "metrics": metric_texts(), "commands": texts}):
            click.echo("\n".join([*lines, "", "mrl help NAME describes one of these."]))
            return
    if name in COMMANDS or path not in keys.known:
        _, chosen, _ = group.resolve_command(root, [name])
        assert chosen is not None  # resolve_command has complained
        click.echo(chosen.get_help(click.Context(chosen, info_name=name, parent=root)))
    if name in COMMANDS and path in keys.known:
        click.echo("\nIn recipes:\n")
    if path in keys.known:
        click.echo("\n".join(keys.lines(path)))
