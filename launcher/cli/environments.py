"""mrl environments: what `environment.name` may be, whether one works, and where to start one of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from launcher.errors import BadInput
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.agent.registry import describe_environments, with_samples


@click.group(
    "environments",
    short_help="List the registered environments, try one, begin one.",
    invoke_without_command=True,
    context_settings={"max_content_width": 120},
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {environments: [{name, description, source}]}.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the registered environments, what each is and which package it comes from.

    A name is what `environment.name` of a recipe may be.
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError("--json belongs behind the subcommand", ctx)
        return
    found = describe_environments()
    if as_json:
        click.echo(json.dumps({"environments": [one._asdict() for one in found]}, indent=2))
        return
    width = max((len(one.name) for one in found), default=0)
    for one in found:
        click.echo(f"{one.name:<{width}}  {one.description}  ({one.source.partition(' (')[0]})")


@command.command("try", short_help="Show problems of an environment with the rewards of a right and a wrong answer.")
@click.argument("name")
@click.option(
    "-n", "problems", type=click.IntRange(min=1), default=3, show_default=True, help="Problems, the first ones."
)
@click.option("--env-args", multiple=True, metavar="KEY=VALUE", help="Argument of it, as for mrl evaluate. Repeatable.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="One JSON object: {environment, problems: [{prompt, gold_reward, wrong_reward}]}.",
)
def try_(name: str, problems: int, env_args: tuple[str, ...], as_json: bool) -> None:
    """Show the first problems of the environment NAME, what its right answer is worth and what a wrong one.

    No model, no GPU and no internet: a shipped data set is stood for by a few made-up rows in its format. Scored by the
    way that answers take in a run. A right answer that cannot be scored, or that is worth no more than a wrong one, is
    reported, with exit code 1.
    """
    from launcher.backends.child import tried  # what the list needs not
    from launcher.job.evaluation_request import checked_environment, parse_args

    try:
        asked = checked_environment(with_samples(EnvironmentConfig(name=name, args=parse_args(env_args))), name)
    except ValueError as error:
        raise BadInput(f"{name}: {error}") from error
    found: list[dict[str, Any]] = []
    for one in tried(asked, problems):
        found.append(one)
        if not as_json:
            click.echo(_shown(one))
    if as_json:
        click.echo(json.dumps({"environment": name, "problems": found}, indent=2))
    unknown = [one for one in found if "no_gold" in one]
    lost = [one for one in found if one["gold_reward"] is None and one not in unknown]
    dull = [
        one for one in found if one["gold_reward"] is not None and one["gold_reward"] <= (one["wrong_reward"] or 0.0)
    ]
    for count, said in (
        (len(unknown), "no right answer is known, so none was scored"),
        (len(lost), "scoring the right answer failed"),
        (len(dull), "the right answer is worth no more than a wrong one"),
    ):
        if count:
            click.echo(f"{count} of {len(found)} problems: {said}", err=True)
    if lost or dull:
        raise SystemExit(1)


@command.command("new", short_help="Write a package with an environment to start from.")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to make. Default: NAME.")
def new(name: str, into: Path | None) -> None:
    """Write a Python package with one environment called NAME: a class, its entry point and a test."""
    from launcher.cli.environment_package import write_package

    folder = into or Path(name)
    for file in write_package(name, folder):
        click.echo(file)
    click.echo(f"next: pip install -e {folder} && mrl environments try {name}")


def _shown(one: dict[str, Any]) -> str:
    lost = "".join(f"\n  {reason}" for reason in (*filter(None, [one.get("no_gold")]), *one.get("failures", ())))
    gold, wrong = (
        f"{reward:g}" if reward is not None else "lost" for reward in (one["gold_reward"], one["wrong_reward"])
    )
    gold = "unknown" if "no_gold" in one else gold
    return f"{one['prompt']}\n  right answer {gold}, wrong answer {wrong}{lost}\n"
