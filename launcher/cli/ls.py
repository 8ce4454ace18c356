"""mrl ls: the runs of this account."""

from __future__ import annotations

import json
import time
from itertools import islice
from typing import Any

import click

COLUMNS = ("run", "state", "step", "last reward", "cluster", "job", "submitted")


@click.command("ls", short_help="List the runs of this account.")
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of runs to show, the newest.",
)
@click.option("--all", "every", is_flag=True, help="Show all runs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {runs: [...]}.")
def command(limit: int, every: bool, as_json: bool) -> None:
    """List the runs submitted from this account whose directories still exist, newest first.

    \b
    Exit codes: 0 listed  2 bad usage
    """
    from launcher.cli.show.history import newest_line
    from launcher.cli.show.scores import brief, result_of, scores_json
    from launcher.runs.find import at_once, newest_first
    from launcher.runs.state import read_statuses
    from megatron_rl.contract.learning import number
    from megatron_rl.contract.paths import RunDir
    from megatron_rl.contract.records import Unreadable, if_readable

    problems: list[str] = []
    entries = newest_first(unread=problems)
    shown = list(islice(entries, None if every else limit))
    statuses = read_statuses([RunDir(one.run_dir) for one in shown])
    newest = at_once(newest_line, [one.run.metrics for one in statuses])
    results = at_once(result_of, [one.run for one in statuses])
    for status, step in zip(statuses, newest, strict=True):
        found = [*status.unread, *([str(step)] if isinstance(step, Unreadable) else [])]
        problems += [f"{status.name}: {problem}" for problem in found]
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
    rows: list[dict[str, Any]] = []
    for entry, status, step, result in zip(shown, statuses, newest, results, strict=True):
        last = if_readable(step)
        rows.append(
            {
                "run": status.name,
                "run_dir": entry.run_dir,
                "state": status.state,
                "step": None if isinstance(step, Unreadable) else last.step if last else 0,
                "steps": status.steps or None,
                "last_reward": number(last, "mean_reward") if last else None,
                "evaluation": result and scores_json(result),
                "cluster": status.cluster or entry.cluster,
                "job": status.job.job_id if status.job else None,
                "submitted": entry.at,
            }
        )
    if as_json:
        click.echo(json.dumps({"runs": rows}))
        return
    if not rows:
        click.echo("no runs yet; mrl-submit demo starts one")
        return
    table = [COLUMNS]
    for row in rows:
        reward = "-" if row["last_reward"] is None else f"{row['last_reward']:.3f}"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["submitted"]))
        if row["evaluation"]:
            reward = "; ".join(brief(scores) for scores in row["evaluation"].values())
        done = f"{'?' if row['step'] is None else row['step']}/{row['steps'] or '?'}"
        table.append((row["run"], row["state"], done, reward, row["cluster"], row["job"] or "-", when))
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if next(entries, None) is not None:
        click.echo("there are older runs: mrl ls --all")
