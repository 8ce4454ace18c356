"""mrl help: describe a command, a key of a recipe, or a metric."""

from __future__ import annotations

import click

from launcher.cli.main import ALIASES, COMMANDS
from launcher.recipe.suggest import did_you_mean

SECTIONS_TOO = ("data", "environments", "resume")  # commands that have the name of a section of recipes


@click.command("help")
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
    # Each page imports its own subject, since the schema of recipes alone takes a tenth of a second.
    if metrics:
        from launcher.cli.show.metric_pages import metrics_page

        click.echo(metrics_page(), nl=False)
    elif markdown:
        from launcher.cli.show.help_pages import Keys

        click.echo(Keys().markdown(), nl=False)
    else:
        _describe(context, name)


def _describe(context: click.Context, name: str | None) -> None:
    group = context.find_root().command
    assert isinstance(group, click.Group)
    root = click.Context(group, info_name=context.find_root().info_name)
    if name is None:
        click.echo(group.get_help(root))
    elif name in COMMANDS or name in ALIASES:
        _describe_command(group, root, name)
        if name in SECTIONS_TOO:
            click.echo("\nIn recipes:\n")
            _describe_key(name)
    elif not _describe_metric(name) and not _describe_key(name):
        group.resolve_command(root, [name])  # raises the error for an unknown word


def _describe_command(group: click.Group, root: click.Context, name: str) -> None:
    found, chosen, _ = group.resolve_command(root, [name])
    assert chosen is not None  # resolve_command has complained
    click.echo(chosen.get_help(click.Context(chosen, info_name=found, parent=root)))


def _describe_metric(name: str) -> bool:
    from megatron_rl.rank.metrics.names import EVALUATION_METRICS, STEP_METRICS

    if name not in STEP_METRICS and name not in EVALUATION_METRICS:
        return False
    from launcher.cli.show.metric_pages import metric_lines

    click.echo("\n".join(metric_lines(name)))
    return True


def _describe_key(name: str) -> bool:
    """Describe a key or a section. Return False for a single word that is neither; others raise UsageError."""
    from launcher.cli.show.help_pages import Keys, key_path

    keys, path = Keys(), key_path(name)
    if path in keys.known:
        click.echo("\n".join(keys.lines(path)))
    elif len(path) > 1:
        raise click.UsageError(f"recipes have no key {name}{did_you_mean(path, keys.known)}")
    return path in keys.known
