"""mrl environments: list the registered environments, or try one."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from launcher.cli.arguments import DEVICE, DTYPE, TRUST_POLICY
from launcher.cli.completion import complete_run
from launcher.doctor.preflight import refuse_unready
from launcher.errors import BadInput
from launcher.recipe.load import load_recipe
from launcher.runs.policy_path import prepare_policy
from megatron_rl.contract.files import seen
from megatron_rl.contract.owned_folders import owned_folder
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.text import printable_lines
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import (
    EnvironmentInfo,
    describe_environments,
    used_files,
    with_kept_files,
    with_samples,
)
from megatron_rl.recipe.requests import Trial

OF_THE_USER = ("python", "program", "judge", "math", "code", "gym", "remote", "verifiers", "multi-task")
OURS = "mrl"
PIPE_WIDTH = 120


@click.group(
    "environments",
    invoke_without_command=True,
    context_settings={"max_content_width": 120},
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object: {environments: [{name, description, source}]}."
)
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the registered environments with a description of each: first those that read data, rewards or programs of
    yours, then those that bring their own problems.

    A recipe sets one of these names as `environment.name`. With --json, all of them with their packages. To write one,
    copy a folder of examples/: environments/riddles (a class, with a test), programs/sums or verifiers/running_sum.
    """
    if ctx.invoked_subcommand is not None:
        if as_json:
            raise click.UsageError("--json belongs after the subcommand", ctx)
        return
    found = describe_environments()
    if as_json:
        click.echo(json.dumps({"environments": [one._asdict() for one in found]}, indent=2))
        return
    click.echo(environment_list(found, shutil.get_terminal_size((PIPE_WIDTH, 0)).columns), nl=False)


def environment_list(found: Sequence[EnvironmentInfo], width: int) -> str:
    """Return the list of environments for people, with a number for the variants of one."""
    names = {one.name for one in found}
    variants = Counter(parent for one in found if (parent := one.name.rpartition("/")[0]) in names)
    rows: dict[str, list[tuple[str, str]]] = {"of your own": [], "with problems": []}
    for one in found:
        if one.name.rpartition("/")[0] in names:
            continue
        package = one.source.partition(" ")[0]
        text = one.description if package == OURS else f"{one.description} ({package})"
        if count := variants[one.name]:
            text += f"; {one.name}/NAME for each of {count} (--json lists them)"
        rows["of your own" if one.name in OF_THE_USER else "with problems"].append((one.name, text))
    formatter = click.HelpFormatter(width=width)
    for heading, group in rows.items():
        with formatter.section(heading):
            formatter.write_dl(group)
    return formatter.getvalue().lstrip("\n")


@command.command("args", short_help="List the arguments of an environment: what each takes, its default and meaning.")
@click.argument("name")
def args(name: str) -> None:
    """List the arguments that the environment NAME takes as `environment.args`: type, default and meaning of each. One
    without a default is required.
    """
    from launcher.cli.show.help_pages import argument_lines  # not needed to list environments

    try:
        click.echo("\n".join(argument_lines(name)))
    except ValueError as error:
        raise BadInput(str(error)) from error


@command.command("try", short_help="Try the first problems of an environment, with or without a model.")
@click.argument("name")
@click.option("-n", "problems", type=click.IntRange(min=1), default=3, show_default=True, help="Number of problems.")
@click.option(
    "--env-args",
    multiple=True,
    metavar="KEY=VALUE",
    help="Argument of the environment, as for mrl evaluate. Repeatable.",
)
@click.option(
    "--answer",
    "answers",
    multiple=True,
    metavar="TEXT",
    help="Scripted answer to a program's call, instead of a model's. Repeatable: the calls of a rollout get them in "
    "their order, and the last one repeats.",
)
@click.option(
    "--model",
    shell_complete=complete_run,
    metavar="PATH",
    help="Let this model answer: a run, a checkpoint, Hugging Face weights, their name in the hub's cache, or "
    "package:NAME.",
)
@click.option(
    "--temperature", type=click.FloatRange(min=0), help="Default of these two: the run's values, else 1, 512."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")
@DTYPE
@DEVICE
@TRUST_POLICY
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object: {environment, problems: [{prompt, gold_reward, wrong_reward}]}, or for conversations "
    "{environment, problems: [{prompt, failures, reward, components, finish_reason, output, sequences}]}.",
)
def try_(name: str, problems: int, env_args: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Try the first problems of the environment NAME, or of a recipe: NAME is then a YAML file. `mrl rows` shows the
    prompts and rewards of a recipe in short; here a program runs, and meets the chat template of the recipe's model,
    which may have no tools.

    Without --model it needs no GPU and no internet: shipped data sets are replaced by a few made-up rows in the same
    format. An environment of answers shows the rewards of a right answer and of a wrong one, which are scored as in a
    run. A right answer that cannot be scored, or whose reward is not higher than that of a wrong one, is reported, and
    the exit code is 1.

    An environment of programs (program, verifiers/ENV) runs each problem once, with scripted answers, and shows the
    conversation as the model sees it: all tokens, which of them would be trained, the reward, and what the program
    printed. With --model, every environment does so with that model's answers. If a rollout is lost, its reason is
    shown, and the exit code is 1.
    """
    from launcher.backends.child import tried  # not needed to list environments
    from launcher.cli.show.ending import indented
    from launcher.cli.show.row_lines import conversation_lines
    from launcher.job.kept_files import copy_files

    trial = _trial(name, problems, env_args, options)
    found: list[dict[str, Any]] = []
    with owned_folder("copies") as folder:
        # As in a run, the user's code is copied first, so that what fails in a run fails here.
        copies = RunDir(folder)
        copy_files(copies, used_files(trial.environment), renew=False)
        environment = with_kept_files(trial.environment, copies)
        for one in tried(trial.model_copy(update={"environment": environment})):
            if trace := one.get("trace"):
                click.echo("\n".join(indented(trace.rstrip().splitlines())), err=True)
                continue
            found.append(one)
            if not as_json:
                talked = "gold_reward" not in one
                click.echo(
                    "\n".join(conversation_lines(one, boundaries=trial.model is not None)) if talked else _shown(one)
                )
    if as_json:
        click.echo(json.dumps({"environment": name, "problems": found}, indent=2))
    faults = [*_faults(found)]
    for fault, count, _ in faults:
        click.echo(f"{count} of {len(found)} problems: {fault}", err=True)
    if any(fails for _, _, fails in faults):
        raise SystemExit(1)


def _trial(name: str, problems: int, env_args: Sequence[str], options: Mapping[str, Any]) -> Trial:
    from launcher.job.evaluation_request import checked_environment, parse_args

    tokenizer = None
    if seen(Path(name).is_file):
        recipe = load_recipe(name, [f"environment.args.{one}" for one in env_args], trusted=options["trust"])
        if not recipe.config.generates:
            raise BadInput(f"{name}: the recipe has no environment; `mrl rows {name}` shows its rows")
        asked, tokenizer = recipe.config.task, recipe.config.tokenizer
    else:
        try:
            asked = checked_environment(with_samples(EnvironmentConfig(name=name, args=parse_args(env_args))), name)
        except ValueError as error:
            raise BadInput(f"{name}: {error}") from error
    model = options["model"]
    if model is not None:
        refuse_unready(device=options["device"], policy=model)
        model = prepare_policy(model, options["trust"])
        if options["answers"]:
            raise BadInput("--answer and --model exclude each other: answers come from a script or from a model")
    sampling = {key: options[key] for key in ("temperature", "max_new_tokens") if options[key] is not None}
    return Trial(
        environment=asked,
        problems=problems,
        answers=options["answers"],
        tokenizer=tokenizer,
        model=model,
        dtype=options["dtype"],
        device=options["device"],
        sampling=sampling,
    )


def _faults(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, bool]]:
    """Yield each fault that some of the problems have, their number, and whether the environment is unusable so."""
    answered = [one for one in found if "gold_reward" in one]
    unknown = [one for one in answered if "no_gold" in one]
    scored = [one for one in answered if one["gold_reward"] is not None]
    counts = {
        ("no right answer is known, so none was scored", False): len(unknown),
        ("scoring the right answer failed", True): len(answered) - len(scored) - len(unknown),
        ("the reward of the right answer is not higher than that of a wrong one", True): sum(
            one["gold_reward"] <= (one["wrong_reward"] or 0.0) for one in scored
        ),
        ("the rollout is lost", True): sum("reward" not in one for one in found) - len(answered),
    }
    yield from ((fault, count, fails) for (fault, fails), count in counts.items() if count)


def _shown(one: dict[str, Any]) -> str:
    from launcher.cli.show.row_lines import said_lines, trace_lines

    lines = [f"  {printable_lines(reason)}" for reason in filter(None, [one.get("no_gold")])]
    for reason in one.get("failures", ()):
        lines += [f"  {printable_lines(reason)}", *trace_lines(one, reason)]
    lines += said_lines(one)
    below = "".join(f"\n{line}" for line in lines)
    gold, wrong = (
        f"{reward:g}" if reward is not None else "lost" for reward in (one["gold_reward"], one["wrong_reward"])
    )
    gold = "unknown" if "no_gold" in one else gold
    return f"{printable_lines(one['prompt'])}\n  right answer {gold}, wrong answer {wrong}{below}\n"
