"""mrl environments: what `environment.name` may be."""

from __future__ import annotations

import json

import click

from megatron_rl.agent.registry import registered


@click.command("environments", short_help="List the registered environments.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {environments: [{name, value, package}]}.")
def command(as_json: bool) -> None:
    """List the registered environments and where each one comes from."""
    found = sorted(registered(), key=lambda entry: entry.name)
    if as_json:
        rows = [{"name": one.name, "value": one.value, "package": one.dist and one.dist.name} for one in found]
        click.echo(json.dumps({"environments": rows}, indent=2))
        return
    width = max((len(entry.name) for entry in found), default=0)
    for entry in found:
        click.echo(f"{entry.name:<{width}}  {entry.value}  ({entry.dist.name if entry.dist else 'unknown package'})")
