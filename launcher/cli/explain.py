"""mrl explain: why a run does not learn."""

from __future__ import annotations

import json

import click

from launcher.cli.completion import complete_run


@click.command("explain", short_help="Say why a run does not learn, with evidence and what to try.")
@click.argument("run", required=False, shell_complete=complete_run)
@click.option("--all", "every", is_flag=True, help="Also name the rules that found nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {run, step, failure, findings, rules}.")
def command(run: str | None, every: bool, as_json: bool) -> None:
    """Print how RUN failed, if it did, and what may keep it from learning by rules over its recipe and its record:
    evidence, and keys to try. Nothing of the run changes; it may be running.

    RUN is a run's name, its directory, its job id, or nothing for the newest. docs/run-directory.md lists the rules.

    \b
    Exit codes: 0 printed, whether anything was found or not  1 the record cannot be read  2 no such run
    """
    from launcher.cli.show.explanation import explanation_json, explanation_lines
    from launcher.explain.explanation import explain
    from launcher.explain.record import read_record
    from launcher.runs.find import find

    found = find(run)
    record = read_record(found)
    explanation = explain(found, record)
    if as_json:
        click.echo(json.dumps(explanation_json(found, explanation)))
    else:
        click.echo("\n".join(explanation_lines(found, record, explanation, every=every)))
