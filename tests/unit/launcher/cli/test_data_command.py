"""mrl data filter: the problems that a policy solves sometimes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launcher.cli.main import main
from launcher.errors import BadInput
from megatron_rl.contract.evaluation_records import EvaluationResult, PassRate
from megatron_rl.contract.records import encode_line, read_lines, write

RATES = [PassRate("", f"{number}", rate, 8, "1+1=") for number, rate in enumerate([0.0, 0.125, 0.5, 1.0, 0.875])]


def filtered(given: Path, out: Path, *options: str) -> Result:
    arguments = ["data", "filter", str(given), "--out", str(out), *options]
    return CliRunner().invoke(main, arguments, prog_name="mrl", standalone_mode=False)


@pytest.fixture
def rates(tmp_path: Path) -> Path:
    path = tmp_path / "r.pass_rates.jsonl"
    path.write_text("".join(f"{encode_line(one)}\n" for one in RATES))
    return path


def kept(path: Path) -> list[float]:
    found = read_lines(PassRate, path)
    return [one.rate for one in found.records]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [0.125, 0.5, 0.875]),
        (["--min", "0"], [0.0, 0.125, 0.5, 0.875]),
        (["--max", "1"], [0.125, 0.5, 1.0, 0.875]),
        (["--min", "0.2", "--max", "0.8"], [0.5]),
    ],
)
def test_problems_within_the_bounds_are_kept(
    rates: Path, tmp_path: Path, options: list[str], left: list[float]
) -> None:
    out = tmp_path / "kept.jsonl"
    said = json.loads(filtered(rates, out, "--json", *options).stdout)
    assert kept(out) == left
    assert said["kept"] == len(left) == said["problems"] - said["below"] - said["above"]


def test_a_result_leads_to_its_pass_rates(rates: Path, tmp_path: Path) -> None:
    write(tmp_path / "r.json", EvaluationResult({}, {}, "r.answers.jsonl", str(rates)))
    said = filtered(tmp_path / "r.json", tmp_path / "kept.jsonl").stdout
    assert "kept 3 of 5 problems: 1 are below, 1 above; mean pass rate 0.500" in said
    assert f"curriculum.start={tmp_path / 'kept.jsonl'}" in said


def test_what_cannot_be_filtered_is_refused_with_a_way_out(rates: Path, tmp_path: Path) -> None:
    out = tmp_path / "kept.jsonl"
    write(tmp_path / "r.json", EvaluationResult({}, {}, "r.answers.jsonl"))
    (tmp_path / "other.jsonl").write_text('{"event": "answers"}\n')
    for given, options, said in (
        (tmp_path / "r.json", [], "repeat mrl evaluate with --keep"),
        (tmp_path / "other.jsonl", [], "is not a file of pass rates"),
        (rates, ["--min", "0.6", "--max", "0.7"], "no problem is left of 5 problems: 3 are below, 2 above"),
        (rates, ["--out", str(tmp_path / "none" / "kept.jsonl")], "No such file or directory; choose another file"),
    ):
        error = filtered(given, out, *options).exception
        assert isinstance(error, BadInput) and said in str(error)
    assert not out.exists()
