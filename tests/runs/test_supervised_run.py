"""Whole supervised runs on two sets of rows: interrupted ones resume exactly, every layout has the same rows and the
same losses, also on held-out rows, and a run that gets no better on these ends with its best checkpoint."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, outcome_of, prepare, reproducible
from optional import needs
from supervised_helpers import sums, supervised_run, write_rows

from launcher.report.write import write_run
from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED, FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts
from megatron_rl.learn.supervised.early_stop import best_after, why_over
from megatron_rl.recipe.training import EarlyStopConfig

pytestmark = needs("datasets")

ROWS, OTHERS, PER_STEP, STEPS = 17, 16, 5, 20
CLOSE = {"rel": 1e-3, "abs": 1e-4}
"""Tolerances: Adam amplifies rounding, since it divides by the size of the gradient."""


def recipe(folder: Path, ranks: int, layout: dict[str, Any], **sections: Any) -> dict[str, Any]:
    if not (folder / "rows.jsonl").exists():
        write_rows(folder / "rows.jsonl", sums(ROWS))
        write_rows(folder / "others.jsonl", sums(OTHERS, seed=1))
    columns = {"prompt": "question", "answer": "answer"}
    sets = [
        {"path": str(folder / "rows.jsonl"), "weight": 0.7, **columns},
        {"path": str(folder / "others.jsonl"), "weight": 0.3, **columns, "held_out": {"share": 0.4}},
    ]
    given: dict[str, Any] = {
        "job": {"gpus_per_node": ranks},
        "data": {"sets": sets, "examples_per_step": PER_STEP, "prompt": None, "answer": None},
        "training": {"steps": STEPS, "tokens_per_microbatch": 32},
        "placement": {"training": layout},
        "save": {"every": 3},
        "evaluation": {"every": 4},
        "logging": {"samples_every": 4},
    }
    return supervised_run(
        **{name: given.get(name, {}) | fields for name, fields in {**given, **sections}.items()}
    ).model_dump()


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
    held = lines_of(undisturbed.evaluations)
    assert [line["step"] for line in held] == [0, 4, 8, 12, 16, 20]
    assert held[-1]["eval/held_out_rows/loss"] == held[-1]["eval/held_out_rows/others/loss"]
    assert held[-1]["eval/held_out_rows/loss"] < 0.9 * held[0]["eval/held_out_rows/loss"]
    assert lines[-1]["sets/rows/epoch"] == pytest.approx(0.7 * STEPS * PER_STEP / ROWS)
    assert "mean_reward" not in lines[0]
    assert sum(line["loss"] for line in lines[-3:]) < 0.9 * sum(line["loss"] for line in lines[:3])
    rows = [*read_rollouts(undisturbed, 4, 4)]
    assert rows[0].answers and rows[0].rewards
    assert {row.environment for row in rows} == {"rows", "others"}


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
    for lines, others in zip(reproducible(run_dir), reproducible(undisturbed), strict=True):
        for mine, other in zip(lines, others, strict=True):
            for line in (mine, other):
                line.pop("packed_tokens_ratio", None)
            assert mine == pytest.approx(other, **CLOSE), f"step {mine['step']}"


def test_a_run_that_gets_no_better_on_held_out_rows_ends_with_its_best_checkpoint(folder: Path) -> None:
    """The run is interrupted between two evaluations, and continues with what it knew of the earlier ones."""
    early = EarlyStopConfig(patience=2, improvement=0.1)
    sections: dict[str, Any] = {
        "training": {"steps": 200, "early_stop": early.model_dump()},
        "save": {"every": 3, "keep": 1},
        "optimizer": {"learning_rate": 0.02, "warmup_steps": 0},
        "evaluation": {"every": 3},
    }
    run_dir = prepare(folder / "early", recipe(folder, 1, {}, **sections))
    killed = Attempt(run_dir, folder / "cache", ranks=1)
    killed.wait_for_step(7)
    killed.kill()
    last = Attempt(run_dir, folder / "cache", ranks=1)
    assert last.exit_codes() == [0], last.logs()
    best, over = None, []
    for line in lines_of(run_dir.evaluations):
        best = best_after(best, line["eval/held_out_rows/loss"], line["step"], early)
        over.append(why_over(best, early))
    outcome = outcome_of(last.files)
    assert best is not None and outcome is not None and best.step > 0
    assert outcome == Outcome(FINISHED, line["step"], over[-1]) and not any(over[:-1])
    assert run_dir.checkpoint_steps() == [line["step"], best.step]
    write_run(run_dir, folder / "page.html")
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "held out rows/others" in page and "Passes over each set" in page
    assert {"Row 1 of rows,", "Row 2 of others,"} <= {*re.findall(r"Row \d of \w+,", page)}


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
