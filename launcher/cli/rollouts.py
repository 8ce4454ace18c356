"""mrl rollouts: prompts and answers of a run."""

from __future__ import annotations

from functools import partial
from itertools import islice, starmap
from typing import Any

import click

from launcher.cli.arguments import RUN, Bounds

SHOWN = 5


@click.command("rollouts")
@RUN
@click.option(
    "--step",
    type=Bounds(whole=True),
    help="Step, or steps: 120, 100:120, 100:. Default: the newest with sampled groups.",
)
@click.option("--environment", metavar="ID", help="Only problems of this environment.")
@click.option("--problem", metavar="DIGEST", help="Only this problem, named as the output names it, or by its start.")
@click.option("--signal/--no-signal", default=None, help="Only groups whose rewards differ, or only those that do not.")
@click.option("--reward", type=Bounds(), help="Only answers with this reward, or from:to.")
@click.option("--reason", metavar="REASON", help="Only answers with this finish reason: stop, length, ...")
@click.option("-n", "most", type=click.IntRange(0), default=SHOWN, show_default=True, help="Groups at most; 0: all.")
@click.option("--full", is_flag=True, help="Show long answers in full.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per group, for jq or grep.")
def command(
    run: str | None,
    step: tuple[float, float] | None,
    most: int,
    full: bool,
    as_json: bool,
    **wanted: Any,
) -> None:
    """Show groups of RUN: a prompt, and the answers to it with reward and advantage. Nothing of the run changes; it may
    be running.

    RUN is a run's name, its directory, its job id, or nothing for the newest. Rewards and lengths are recorded of every
    group; texts and tokens of logging.samples groups every logging.samples_every steps. The page of
    `mrl report` shows the tokens, --json has them with their log-probs.

    \b
    mrl rollouts mine --step 120 --reward 0 -n 5      answers of step 120 that earned nothing
    mrl rollouts mine --step 1: --problem 3fa9 -n 0   one problem over all steps
    mrl rollouts mine --step 1: -n 0 --json | grep -i pizza      groups with a word in a prompt or an answer
    \b
    Exit codes: 0 printed  1 nothing is recorded, or nothing fits  2 no such run
    """
    from launcher.cli.show.groups import group_json, group_lines
    from launcher.errors import Failed
    from launcher.runs.find import find
    from launcher.runs.rollout_selection import Wanted, nothing_fits, recorded_groups, selected

    found = find(run)
    fitting = selected(recorded_groups(found, step), Wanted(**wanted))
    texts = starmap(group_json if as_json else partial(group_lines, full=full), fitting)
    shown = [*islice(texts, most or None)]
    if not shown:
        raise Failed(nothing_fits(found))
    click.echo("\n".join(shown))
    if len(shown) == most and next(texts, None) is not None:
        click.echo("more fit: -n 0 shows all", err=True)
