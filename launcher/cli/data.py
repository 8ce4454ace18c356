"""mrl data: choose the problems of a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from launcher.errors import BadInput
from megatron_rl.contract.evaluation_records import EvaluationResult, PassRate
from megatron_rl.contract.files import seen, write_atomic
from megatron_rl.contract.records import Unreadable, encode_line, read, read_lines


@click.group("data")
def command() -> None:
    """Choose the problems of a run."""


@command.command("filter")
@click.argument("rates", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--min", "least", type=click.FloatRange(0, 1), help="Lowest pass rate that is kept. Default: above 0.")
@click.option("--max", "most", type=click.FloatRange(0, 1), help="Highest pass rate that is kept. Default: below 1.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File to write.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: {problems, kept, below, above, out}.")
def filter_(rates: Path, least: float | None, most: float | None, out: Path, as_json: bool) -> None:
    """Write the problems of RATES whose pass rate says that they teach: those with right and wrong answers, or those
    between --min and --max.

    RATES is the result of `mrl evaluate RUN --keep`, or its NAME.pass_rates.jsonl, whose form the written file has too.
    A recipe reads it with curriculum.start, where the first pass begins with these rates, and trains on its problems
    alone with curriculum.only=true.

    \b
    Exit codes:
      0  done
      2  RATES cannot be used, or no problem is left
    """
    found = _read(rates)
    below = [one for one in found if one.rate < (math.ulp(0.0) if least is None else least)]
    above = [one for one in found if one.rate > (1 - math.ulp(0.5) if most is None else most)]
    left_out = {*below, *above}
    kept = [one for one in found if one not in left_out]
    said = f"{len(found):,} problems: {len(below):,} are below, {len(above):,} above"
    if not kept:
        raise BadInput(f"{rates}: no problem is left of {said}; choose other bounds, or answer more problems")
    try:
        write_atomic(out, "".join(f"{encode_line(one)}\n" for one in kept))
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}; choose another file") from error
    if as_json:
        counts = {"problems": len(found), "kept": len(kept), "below": len(below), "above": len(above)}
        click.echo(json.dumps({**counts, "out": str(out)}))
        return
    mean = math.fsum(one.rate for one in kept) / len(kept)
    click.echo(f"kept {len(kept):,} of {said}; mean pass rate {mean:.3f}")
    click.echo(f"next: mrl-submit RECIPE curriculum.start={out} curriculum.only=true")


def _read(path: Path) -> list[PassRate]:
    """Read a file of pass rates, or that of a result. Raises BadInput."""
    if not seen(path.exists):
        raise BadInput(f"{path}: there is no such file; `mrl evaluate RUN --keep` writes one")
    if path.suffix == ".json":
        result = read(EvaluationResult, path)
        if not isinstance(result, EvaluationResult):
            raise BadInput(f"{path} is not a result of mrl evaluate")
        if result.pass_rates is None:
            raise BadInput(f"{path} has no pass rates of training problems: repeat mrl evaluate with --keep")
        path = Path(result.pass_rates)
    lines = read_lines(PassRate, path)  # empty for an absent file
    if isinstance(lines, Unreadable):
        raise BadInput(str(lines))
    if lines.damaged or not lines.records:
        why = f"line {lines.damaged[0].line} {lines.damaged[0].why}" if lines.damaged else "it has no line"
        raise BadInput(f"{path} is not a file of pass rates of `mrl evaluate --keep`: {why}")
    return list(lines.records)
