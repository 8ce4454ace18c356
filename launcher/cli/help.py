"""mrl help: what a command does."""

from __future__ import annotations

import click


@click.command("help", short_help="Say what a command does.")
@click.argument("name", metavar="[COMMAND]", required=False)
@click.pass_context
def command(context: click.Context, name: str | None) -> None:
    """Say what COMMAND does, as its --help; without one, which commands there are.

    \b
    Exit codes: 0 said  2 there is no such command
    """
    group = context.find_root().command
    assert isinstance(group, click.Group)
    root = click.Context(group, info_name=context.find_root().info_name)
    if name is None:
        click.echo(group.get_help(root))
        return
    _, chosen, _ = group.resolve_command(root, [name])
    assert chosen is not None  # resolve_command has complained
    click.echo(chosen.get_help(click.Context(chosen, info_name=name, parent=root)))
