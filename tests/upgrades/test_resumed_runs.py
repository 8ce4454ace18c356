"""Runs that earlier releases have begun, under today's code: every command reads them, and they resume."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import commands
import pytest
from exactly_once import fates
from loop_helpers import lines_of, reproducible
from recorded_runs import CASES, RELEASES, STEPS, WITHOUT_BITS, environment, has_same_bits, unpack

from megatron_rl.contract.paths import RunDir

LIMIT_S = 900.0
IN_MAKE_TEST = {("colocated", RELEASES[0])}
"""The others take minutes."""
each_run = pytest.mark.parametrize(
    ("release", "case"),
    [
        pytest.param(release, case, marks=[] if (case, release) in IN_MAKE_TEST else pytest.mark.slow)
        for release in RELEASES
        for case in CASES
    ],
)
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def mrl(folder: Path, *words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = commands.run(["mrl", *words], LIMIT_S, cwd=folder, env=environment(folder))
    assert done.returncode == code, f"mrl {' '.join(map(str, words))}\n{done.stdout}{done.stderr}"
    assert "Traceback" not in done.stdout + done.stderr
    return done


def recorded(run: RunDir) -> list[list[Mapping[str, Any]]]:
    """Return metrics and evaluations, less the metrics that only later releases write."""
    return [[{**line} for line in lines] for lines in reproducible(run)]


def without_newer(lines: list[list[Mapping[str, Any]]], known: list[list[Mapping[str, Any]]]) -> Any:
    names = [{name for line in one for name in line} for one in known]
    return [
        [{name: value for name, value in line.items() if name in among} for line in one]
        for one, among in zip(lines, names, strict=True)
    ]


@each_run
def test_a_run_of_an_earlier_release_resumes_under_todays_code(tmp_path: Path, release: str, case: str) -> None:
    """Bit for bit as the earlier release would have continued, where this machine has its packages."""
    root, undisturbed = unpack(release, case, tmp_path)
    run, expected = RunDir(root), RunDir(undisturbed)
    begun = len(lines_of(run.metrics))
    said = mrl(tmp_path, "resume", root).stdout
    assert f"finished: {STEPS} steps" in said
    assert run.done.exists()
    assert [line["step"] for line in lines_of(run.metrics)] == [*range(1, STEPS + 1)]
    assert begun < STEPS
    if case != "supervised":
        fates(run)
    if case not in WITHOUT_BITS and has_same_bits(release):
        wanted = recorded(expected)
        assert without_newer(recorded(run), wanted) == wanted
    assert json.loads(mrl(tmp_path, "status", root, "--json").stdout)["state"] == "finished"


@each_run
def test_every_command_reads_a_run_of_an_earlier_release(tmp_path: Path, release: str, case: str) -> None:
    root, _ = unpack(release, case, tmp_path)
    status = json.loads(mrl(tmp_path, "status", root, "--json").stdout)
    assert status["state"] == "stopped"
    assert 0 < status["step"] < STEPS
    assert "stopped" in mrl(tmp_path, "status", root).stdout
    assert json.loads(mrl(tmp_path, "explain", root, "--json").stdout)["step"] == status["step"]
    mrl(tmp_path, "report", root)
    assert (root / "report.html").stat().st_size > 10_000
    assert "would fork" in mrl(tmp_path, "fork", root, "--dry-run").stdout
    assert "steps: 20" in mrl(tmp_path, "resume", root, "training.steps=20", "--dry-run").stdout
    evaluate = ("evaluate", root, "--k", "1", "--prompts", "4", "--json")
    if case == "lora":  # of a base that demo initialises
        assert "adapters of a base that its run has initialised itself" in mrl(tmp_path, *evaluate, code=2).stderr
    else:
        result = json.loads(mrl(tmp_path, *evaluate).stdout)
        assert result["settings"]["checkpoint"]["step"] == status["step"]
    if case != "supervised":
        groups = mrl(tmp_path, "rollouts", root, "--json").stdout.splitlines()
        group = json.loads(groups[0])
        answers = (root, str(group["step"]), str(group["ordinal"]))
        again = json.loads(mrl(tmp_path, "replay", *answers, "--no-sample", "--json").stdout)
        assert again


@pytest.mark.slow
def test_a_run_of_an_earlier_release_is_forked(tmp_path: Path) -> None:
    root, _ = unpack(RELEASES[0], "colocated", tmp_path)
    mrl(tmp_path, "fork", root, "--run-dir", tmp_path / "fork", "training.steps=7", "grpo.kl_beta=0.0")
    assert [line["step"] for line in lines_of(RunDir(tmp_path / "fork").metrics)] == [*range(1, 8)]


def test_a_checkout_holds_runs_of_the_last_three_releases() -> None:
    assert len(RELEASES) >= 3
    assert sum((Path(__file__).parent / f"{release}.tar.xz").stat().st_size for release in RELEASES) < 500_000
