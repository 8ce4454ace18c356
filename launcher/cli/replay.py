"""mrl replay: a recorded prompt, answered and scored again."""

from __future__ import annotations

from typing import Any

import click

from launcher.cli.arguments import DEVICE, TRUST_RUN
from launcher.cli.completion import complete_run


@click.command("replay")
@click.argument("run", shell_complete=complete_run)
@click.argument("step", type=click.IntRange(min=1))
@click.argument("prompt")
@click.option(
    "--checkpoint",
    type=click.IntRange(min=0),
    metavar="STEP",
    help="Weights that answer: of the checkpoint after this step. Default: those that sampled the recorded answers.",
)
@click.option("--answer", type=click.IntRange(min=0), metavar="N", help="Show only this answer, with all its tokens.")
@click.option("--sample/--no-sample", default=True, show_default=True, help="Answer again, or only score again.")
@DEVICE
@TRUST_RUN
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: both groups with their tokens, scores.")
def command(run: str, answer: int | None, as_json: bool, **options: Any) -> None:
    """Answer PROMPT of a recorded STEP of RUN again, with the random numbers of that step, and score the recorded
    answers with today's reward code.

    PROMPT is the number of a prompt or the digest of its problem, as `mrl rollouts RUN --step STEP` shows them; it must
    be recorded with tokens (logging.samples, logging.samples_every). On a CPU, the weights that sampled it give the
    same tokens and log-probs again, bit for bit, if the run had the same layout (one rank for each model). Other
    weights show what the steps between have changed, with the same random numbers.

    Rewards come from the environment's code as it is now, not from the run's copy of it: so a corrected reward function
    can be tried on answers of a run. A program of today, or an environment of verifiers, works on the problem again and
    gets the recorded answers of the model; where it asks for others, that is said.

    \b
    mrl replay mine 120 3841                      the answers of step 120 to prompt 3841
    mrl replay mine 120 3841 --checkpoint 900     what the weights after step 900 say instead
    mrl replay mine 120 3841 --no-sample          only today's rewards; needs no checkpoint
    \b
    Exit codes: 0 shown  1 failed  2 the run, the prompt or the checkpoint cannot be used; the message names others
    """
    from launcher.cli.show.replay_lines import replay_json, replay_lines
    from launcher.errors import BadInput
    from launcher.runs.find import find
    from launcher.runs.replay import replay

    found = replay(find(run), **options)
    if answer is not None and answer not in (known := [pair.sample for pair in found.pairs()]):
        raise BadInput(f"--answer {answer}: the answers are {', '.join(map(str, known))}")
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(replay_json(found) if as_json else "\n".join(replay_lines(found, answer)))
