"""mrl environments: what `environment.name` may be."""

from __future__ import annotations

from importlib.metadata import entry_points

import click

from megatron_rl.agent.registry import GROUP


@click.command("environments")
def command() -> None:
    """List the registered environments and where each one comes from."""
    found = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        click.echo(f"{entry.name:<{width}}  {entry.value}  ({entry.dist.name if entry.dist else 'unknown package'})")
