"""Lists in the terminal: the runs of this account, and the shipped recipes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.show.scores import brief, result_of, scores_json
from launcher.cli.show.terminal import columns
from launcher.recipe.shipped import shipped_recipes
from launcher.runs.find import at_once, newest_first
from launcher.runs.state import RunStatus, read_statuses
from launcher.runs.step_record import newest_line
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.learning import number
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Found, Unreadable, if_readable
from megatron_rl.contract.run_records import Submission
from megatron_rl.contract.text import moment

if TYPE_CHECKING:
    from launcher.recipe.load import Recipe

COLUMNS = ("run", "state", "step", "last reward", "cluster", "job", "submitted")


def list_runs(limit: int | None, as_json: bool) -> None:
    problems: list[str] = []
    entries = newest_first(unread=problems)
    shown = list(islice(entries, limit))
    statuses = read_statuses([RunDir(one.run_dir) for one in shown])
    newest = at_once(newest_line, [one.run.metrics for one in statuses])
    results = at_once(result_of, [one.run for one in statuses])
    for status, step in zip(statuses, newest, strict=True):
        found = [*status.unread, *([str(step)] if isinstance(step, Unreadable) else [])]
        problems += [f"{status.name}: {problem}" for problem in found]
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
    rows = [*map(_row, shown, statuses, newest, results)]
    if as_json:
        click.echo(json.dumps({"runs": rows}))
        return
    click.echo("\n".join(columns([COLUMNS, *map(_cells, rows)])) if rows else "no runs yet; mrl-submit demo starts one")
    if next(entries, None) is not None:
        click.echo("there are older runs: mrl ls --all")


def _row(
    entry: Submission, status: RunStatus, newest: Found[MetricsLine], result: EvaluationResult | None
) -> dict[str, Any]:
    last = if_readable(newest)
    return {
        "run": status.name,
        "run_dir": entry.run_dir,
        "state": status.state,
        "step": None if isinstance(newest, Unreadable) else last.step if last else 0,
        "steps": status.steps or None,
        "last_reward": number(last, "mean_reward") if last else None,
        "evaluation": result and scores_json(result),
        "cluster": status.cluster or entry.cluster,
        "job": status.job.job_id if status.job else None,
        "submitted": entry.at,
    }


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    reward = "-" if row["last_reward"] is None else f"{row['last_reward']:.3f}"
    if row["evaluation"]:
        reward = "; ".join(brief(scores) for scores in row["evaluation"].values())
    done = f"{'?' if row['step'] is None else row['step']}/{row['steps'] or '?'}"
    when = moment(row["submitted"], "%Y-%m-%d %H:%M")
    return (row["run"], row["state"], done, reward, row["cluster"], row["job"] or "-", when)


def _recipe_rows() -> list[dict[str, Any]]:
    from launcher.recipe.load import load_recipe  # slow to import, and a list of runs does not need it

    return [_recipe_row(load_recipe(name)) for name in shipped_recipes()]


def recipes_json() -> str:
    return json.dumps({"recipes": _recipe_rows()}, indent=2)


def recipe_lines() -> Iterator[str]:
    rows = _recipe_rows()
    table = columns([(line["name"], line["model"].rpartition("/")[2], _ranks(line), line["mode"]) for line in rows])
    for first, line in zip(table, rows, strict=True):
        yield from (first, f"    {line['purpose']}")


def _recipe_row(recipe: Recipe) -> dict[str, Any]:
    config = recipe.config
    return {
        "name": recipe.asked,
        "model": config.model.huggingface or f"{config.model.num_layers} layers of {config.model.hidden_size}",
        "nodes": config.job.nodes,
        "gpus_per_node": config.job.gpus_per_node,
        "device": config.job.device,
        "mode": config.placement.mode,
        "purpose": purpose(recipe.text),
    }


def purpose(text: str) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    comment: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    return " ".join(comment).partition(". ")[0].rstrip(".")


def _ranks(line: dict[str, Any]) -> str:
    return f"{line['nodes']} x {line['gpus_per_node']}{' CPU' if line['device'] == 'cpu' else ''}"
