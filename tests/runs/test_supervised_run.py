"""Whole supervised runs: interrupted ones resume exactly, and every layout has the same rows and the same losses."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, outcome_of, prepare, reproducible
from optional import needs
from supervised_helpers import sums, supervised_run, write_rows

from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts

pytestmark = needs("datasets")

ROWS, PER_STEP, STEPS = 17, 5, 20
CLOSE = {"rel": 1e-3, "abs": 1e-4}
"""Tolerances: Adam amplifies rounding, since it divides by the size of the gradient."""


def recipe(folder: Path, ranks: int, layout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    rows = folder / "rows.jsonl"
    if not rows.exists():
        write_rows(rows, sums(ROWS))
    config = supervised_run(
        job={"gpus_per_node": ranks},
        data={"path": str(rows), "examples_per_step": PER_STEP},
        training={"steps": STEPS, "tokens_per_microbatch": 32},
        placement={"training": layout},
        save={"every": 3},
        logging={"samples_every": 4},
        **sections,
    )
    return config.model_dump()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("supervised")


def finished(run_dir: RunDir, cache: Path, ranks: int) -> RunDir:
    attempt = Attempt(run_dir, cache, ranks=ranks)
    assert attempt.exit_codes() == [0] * ranks, attempt.logs()
    return run_dir


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> RunDir:
    return finished(prepare(folder / "undisturbed", recipe(folder, 2, {})), folder / "cache", 2)


def test_each_pass_trains_on_every_row_once_and_the_loss_falls(undisturbed: RunDir) -> None:
    lines = lines_of(undisturbed.metrics)
    assert [(line["first_ordinal"], line["next_ordinal"]) for line in lines] == [
        (step * PER_STEP, (step + 1) * PER_STEP) for step in range(STEPS)
    ]
    assert lines[-1]["epoch"] == pytest.approx(STEPS * PER_STEP / ROWS)
    assert "mean_reward" not in lines[0]
    assert sum(line["loss"] for line in lines[-3:]) < 0.8 * sum(line["loss"] for line in lines[:3])
    (row, *_) = read_rollouts(undisturbed, 4, 4)
    assert row.answers and row.rewards
    assert not lines_of(undisturbed.evaluations)


def test_a_killed_and_a_drained_attempt_change_no_bit_of_the_record(folder: Path, undisturbed: RunDir) -> None:
    run_dir = prepare(folder / "interrupted", recipe(folder, 2, {}))
    killed = Attempt(run_dir, folder / "cache")
    killed.wait_for_step(5)
    killed.kill()
    drained = Attempt(run_dir, folder / "cache")
    drained.wait_for_step(7)
    for process in drained.processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGUSR1)
    codes = drained.exit_codes()
    if codes == [EXIT_DRAINED] * 2:  # else it had finished already
        assert (outcome := outcome_of(drained.files)) is not None
        assert outcome.outcome == DRAINED
        finished(run_dir, folder / "cache", 2)
    assert reproducible(run_dir) == reproducible(undisturbed)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="one rank", marks=pytest.mark.slow),
        pytest.param(2, {"tp": 2}, id="TP2"),
        pytest.param(2, {"cp": 2}, id="CP2", marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2}, id="PP2", marks=pytest.mark.slow),
    ],
)
def test_other_layouts_have_the_same_record(folder: Path, undisturbed: RunDir, ranks: int, layout: Any) -> None:
    name = "-".join(layout) or "alone"
    run_dir = finished(prepare(folder / name, recipe(folder, ranks, layout)), folder / "cache", ranks)
    for mine, other in zip(reproducible(run_dir)[0], reproducible(undisturbed)[0], strict=True):
        for line in (mine, other):
            line.pop("packed_tokens_ratio")
        assert mine == pytest.approx(other, **CLOSE), f"step {mine['step']}"


def test_changed_data_are_refused_at_a_resume(folder: Path, undisturbed: RunDir) -> None:
    run_dir = prepare(folder / "changed", recipe(folder, 1, {}))
    attempt = Attempt(run_dir, folder / "cache", ranks=1)
    attempt.wait_for_step(7)  # the checkpoint of step 3 is published before that of step 6 begins
    attempt.kill()
    rows = folder / "rows.jsonl"
    kept = rows.read_text()
    try:
        rows.write_text(kept + '{"question": "1+1=", "answer": "2"}\n')
        again = Attempt(run_dir, folder / "cache", ranks=1)
        assert again.exit_codes() == [78], again.logs()
    finally:
        rows.write_text(kept)
    assert "the training problems differ from those that the run had" in again.logs()
