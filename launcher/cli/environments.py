"""mrl environments: list the registered environments, try one, or start a new one."""

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
    short_help="List the registered environments, try one, or start a new one.",
    invoke_without_command=True,
    context_settings={"max_content_width": 120},
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: {environments: [{name, description, source}]}."
)
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the registered environments, with a description and the package of each.

    A recipe sets one of these names as `environment.name`.
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError("--json belongs after the subcommand", ctx)
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
@click.option("-n", "problems", type=click.IntRange(min=1), default=3, show_default=True, help="Number of problems.")
@click.option(
    "--env-args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment, as for mrl evaluate. Repeatable.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: {environment, problems: [{prompt, gold_reward, wrong_reward}]}.",
)
def try_(name: str, problems: int, env_args: tuple[str, ...], as_json: bool) -> None:
    """Show the first problems of the environment NAME, with the rewards of a right answer and of a wrong one.

    Needs no model, no GPU and no internet: shipped data sets are replaced by a few made-up rows in the same format.
    Answers are scored as in a run. A right answer that cannot be scored, or whose reward is not higher than that of a
    wrong one, is reported, and the exit code is 1.
    """
    from launcher.backends.child import tried  # not needed to list environments
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
    for count, fault in (
        (len(unknown), "no right answer is known, so none was scored"),
        (len(lost), "scoring the right answer failed"),
        (len(dull), "the reward of the right answer is not higher than that of a wrong one"),
    ):
        if count:
            click.echo(f"{count} of {len(found)} problems: {fault}", err=True)
    if lost or dull:
        raise SystemExit(1)


@command.command("new", short_help="Write a package with a new environment.")
@click.argument("name")
@click.option("--into", type=click.Path(path_type=Path), help="Directory to create. Default: NAME.")
def new(name: str, into: Path | None) -> None:
    """Write a Python package with a new environment NAME: a class, its entry point and a test."""
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
