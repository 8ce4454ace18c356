"""mrl help: describe a command, a key of a recipe, or a metric."""

from __future__ import annotations

import click

from launcher.cli.main import COMMANDS
from launcher.recipe.suggest import did_you_mean


@click.command("help", short_help="Describe a command, a key of a recipe, or a metric.")
@click.argument("name", metavar="[COMMAND|KEY|SECTION|METRIC]", required=False)
@click.option("--markdown", is_flag=True, help="Print the reference of all keys, docs/keys.md.")
@click.option("--metrics", is_flag=True, help="Print the reference of all metrics, docs/metrics.md.")
@click.option("--recipes", is_flag=True, help="List the recipes that can be submitted by name. Short: mrl recipes.")
@click.option("--json", "as_json", is_flag=True, help="With --recipes: print one JSON object: {recipes: [...]}.")
@click.pass_context
def command(
    context: click.Context,
    name: str | None,
    markdown: bool,
    metrics: bool,
    recipes: bool,
    as_json: bool,
) -> None:
    """Print the help of COMMAND, or the list of commands.

    For a KEY of recipes, such as grpo.kl_beta: what it takes, its default and its meaning. For a SECTION, such as grpo:
    all of its keys. For a METRIC, such as truncated_ratio: its meaning, unit and good range, and what to do outside of
    it. `mrl help --markdown | grep WORD` finds the keys about something.

    \b
    Exit codes: 0 printed  2 nothing has this name
    """
    if as_json and not recipes:
        raise click.UsageError("--json: only with --recipes", context)
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
    group = context.find_root().command
    assert isinstance(group, click.Group)
    root = click.Context(group, info_name=context.find_root().info_name)
    if name is None:
        click.echo(group.get_help(root))
        return
    from launcher.cli.show.help_pages import Keys, key_path, metric_lines

    keys, path = Keys(), key_path(name)
    if name not in COMMANDS and path not in keys.known and (entry := metric_lines(name)):
        click.echo("\n".join(entry))
        return
    if len(path) > 1 and path not in keys.known:
        raise click.UsageError(f"recipes have no key {name}{did_you_mean(path, keys.known)}", context)
    if name in COMMANDS or path not in keys.known:
        found, chosen, _ = group.resolve_command(root, [name])
        assert chosen is not None  # resolve_command has complained
        click.echo(chosen.get_help(click.Context(chosen, info_name=found, parent=root)))
    if name in COMMANDS and path in keys.known:
        click.echo("\nIn recipes:\n")
    if path in keys.known:
        click.echo("\n".join(keys.lines(path)))
