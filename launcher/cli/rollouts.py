"""mrl rollouts: prompts and answers of a run."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice, starmap
from typing import TYPE_CHECKING, Any

import click

from launcher.cli.arguments import RUN, Bounds
from megatron_rl.contract.paths import RunDir

if TYPE_CHECKING:
    from megatron_rl.contract.rollout_records import GroupLine

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
    from launcher.runs.rollout_selection import Wanted, selected

    found = find(run)
    newest = _newest_step(found)
    fitting = selected(_groups(found, newest, step), Wanted(**wanted))
    texts = starmap(group_json if as_json else partial(group_lines, full=full), fitting)
    shown = [*islice(texts, most or None)]
    if not shown:
        raise Failed(
            f"{found.root.name}: no recorded group fits. --step asks for other steps, 1 to {newest}; only sampled "
            f"groups have texts (logging.samples_every){_of_parent(found)}"
        )
    click.echo("\n".join(shown))
    if len(shown) == most and next(texts, None) is not None:
        click.echo("more fit: -n 0 shows all", err=True)


def _newest_step(run: RunDir) -> int:
    from launcher.cli.show.history import newest_line
    from launcher.errors import Failed
    from megatron_rl.contract.records import Absent, Unreadable

    line = newest_line(run.metrics)
    if isinstance(line, Unreadable):
        raise Failed(str(line))
    if isinstance(line, Absent):
        raise Failed(f"{run.root.name} has not finished a step yet: {run.metrics} does not exist or is empty")
    return line.step


def _groups(run: RunDir, newest: int, steps: tuple[float, float] | None) -> Iterator[GroupLine]:
    """Groups of the steps from:to; by default of the newest with sampled groups. Raises Failed."""
    from launcher.errors import Failed
    from launcher.runs.rollout_selection import newest_sampled
    from megatron_rl.contract.rollout_records import read_rollouts

    if steps is None:
        return iter(newest_sampled(run, newest))
    first, last = max(1, steps[0]), min(newest, steps[1])
    if first > last:
        raise Failed(f"{run.root.name} has no step {steps[0]:g} yet: its newest is {newest}")
    return read_rollouts(run, int(first), int(last))


def _of_parent(run: RunDir) -> str:
    from megatron_rl.contract.records import if_readable, read
    from megatron_rl.contract.run_records import Fork

    fork = if_readable(read(Fork, run.fork))
    return f". Steps up to {fork.step} are recorded in {fork.source}, from which the run was forked" if fork else ""
