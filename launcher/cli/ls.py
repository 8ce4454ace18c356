"""mrl ls: the runs of this account."""

from __future__ import annotations

import json
import time

import click

COLUMNS = ("run", "state", "step", "last reward", "cluster", "job", "submitted")


@click.command("ls", short_help="List the runs of this account.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, help="Newest runs to show.")
@click.option("--all", "every", is_flag=True, help="All of them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object: {runs: [...]}.")
def command(limit: int, every: bool, as_json: bool) -> None:
    """List the runs that were submitted from this account and whose directory is still there, newest first.

    \b
    Exit codes: 0 listed  2 bad usage
    """
    from launcher.cli.show.progress import last_row
    from launcher.runs.find import runs, submissions
    from launcher.runs.state import look_all
    from megatron_rl.contract.paths import RunDir

    entries = runs(submissions())
    shown = entries if every else entries[:limit]
    rows = []
    for entry, standing in zip(shown, look_all([RunDir(one.run_dir) for one in shown]), strict=True):
        last = last_row(standing.run.metrics) or {}
        rows.append(
            {
                "run": standing.name,
                "run_dir": entry.run_dir,
                "state": standing.state,
                "step": last.get("step", 0),
                "steps": standing.steps,
                "last_reward": last.get("mean_reward"),
                "cluster": standing.cluster,
                "job": standing.job.job_id if standing.job else None,
                "submitted": entry.at,
            }
        )
    if as_json:
        click.echo(json.dumps({"runs": rows}))
        return
    if not rows:
        click.echo("no runs yet; mrl-submit demo makes one")
        return
    table = [COLUMNS]
    for row in rows:
        reward = "-" if row["last_reward"] is None else f"{row['last_reward']:.3f}"
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["submitted"]))
        step = f"{row['step']}/{row['steps']}"
        table.append((row["run"], row["state"], step, reward, row["cluster"], row["job"] or "-", when))
    widths = [max(len(line[column]) for line in table) for column in range(len(COLUMNS))]
    for line in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if len(entries) > len(shown):
        click.echo(f"and {len(entries) - len(shown)} older ones: mrl ls --all")
