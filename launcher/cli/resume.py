"""mrl resume: resume a run that has ended."""

from __future__ import annotations

import re
from typing import Any

import click

from launcher.cli.arguments import OVERRIDES, STARTED, TRUST_RUN
from launcher.cli.completion import complete_run
from launcher.recipe.changes import CHANGEABLE

OVERRIDE = re.compile(r"[\w.]+=")

HELP = f"""Resume RUN from its newest checkpoint: a new job (or local start) in the same run directory, with the same
recipe and, unless --update-code, the same snapshot of the code.

RUN is a run's name, its directory, its job id, or nothing for the newest. SECTION.KEY=VALUE changes one of these
values, which is recorded: {", ".join(CHANGEABLE)}. A larger training.steps reopens a finished run, and a decayed
learning rate rises again: the printed change says from what to what, and how to keep it.

\b
Exit codes: as of mrl-submit; 2 also if a live job owns the run
"""


@click.command("resume", help=HELP)
@click.argument("run", default="-", shell_complete=complete_run)
@OVERRIDES
@click.option("--update-code", is_flag=True, help="Take a new snapshot, of this mrl and of what the run includes.")
@click.option("--cluster", help="Cluster to resume on, instead of the run's.")
@TRUST_RUN
@click.option("--dry-run", is_flag=True, help="Show what would be submitted; write nothing.")
@STARTED
@click.pass_context
def command(context: click.Context, run: str, overrides: tuple[str, ...], cluster: str | None, **others: Any) -> None:
    from launcher.cli.submit.launch import launch
    from launcher.runs.find import find, names_run
    from launcher.start.request import resumption

    if OVERRIDE.match(run) and not names_run(run):  # no RUN was given; runs of a sweep have = in their names
        run, overrides = "-", (run, *overrides)
    found = find(None if run == "-" else run)
    context.exit(launch(resumption(found, overrides, cluster, **others)))
