"""A run that resumes with other numbers of ranks has the same prompts and the same record."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, loop_recipe, outcome_of, prepare, reproducible

from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts

RANKS = (2, 1, 3)
UNTIL = (3, 6)
"""Steps at which the number of ranks changes."""
STEPS = 9

RECIPE = loop_recipe(
    training={"steps": STEPS},
    evaluation={"every": 3},
    save={"every": 3},
    logging={"samples_every": 1, "samples": 1},
)


def answers(run: RunDir) -> list[Any]:
    """Groups of all steps, of which all ranks have a part; texts of those that are sampled."""
    return [
        (group.step, group.ordinal, group.prompt, group.rewards, group.lengths, [one.text for one in group.answers])
        for group in read_rollouts(run, 1, STEPS)
    ]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunDir:
    run = prepare(tmp_path_factory.mktemp("runs") / "one", RECIPE)
    attempt = Attempt(run, cache, ranks=1)
    assert attempt.exit_codes() == [EXIT_FINISHED], attempt.logs()
    return run


def test_run_on_two_ranks_then_one_then_three_leaves_the_record_of_one(
    on_one_rank: RunDir, tmp_path: Path, cache: Path
) -> None:
    run = prepare(tmp_path / "elastic", RECIPE)
    for ranks, until in zip(RANKS, UNTIL, strict=False):
        attempt = Attempt(run, cache, ranks)
        attempt.wait_for_step(until)
        os.kill(attempt.processes[-1].pid, signal.SIGUSR1)
        assert attempt.exit_codes() == [EXIT_DRAINED] * ranks, attempt.logs()
        outcome = outcome_of(attempt.files)
        assert outcome is not None
        assert outcome.step is not None
        assert outcome.step < STEPS
    last = Attempt(run, cache, RANKS[-1])
    assert last.exit_codes() == [EXIT_FINISHED] * RANKS[-1], last.logs()

    assert answers(run) == answers(on_one_rank) != []
    for ours, theirs in zip(reproducible(run), reproducible(on_one_rank), strict=True):
        assert len(ours) == len(theirs)
        for line, expected in zip(ours, theirs, strict=True):
            assert line == pytest.approx(expected, rel=1e-4, abs=1e-4)
