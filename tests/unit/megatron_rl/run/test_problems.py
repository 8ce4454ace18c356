"""A run goes on with the problems that it was trained on, on all ranks, unless somebody has asked for others."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.contract.run_records import Fork
from megatron_rl.errors import ConfigurationError
from megatron_rl.run import problems as problems_module
from megatron_rl.run.problems import check_alike, check_unchanged, digests_of
from megatron_rl.run.setup import Counters

BEFORE = {"sums": ProblemDigest(1500, "a"), "puzzles": ProblemDigest(10, "b")}
NOW = {"sums": ProblemDigest(1499, "c"), "puzzles": ProblemDigest(10, "b")}
STEP = 40


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "mine")


def forked_at(run_dir: RunDir, step: int) -> None:
    run_dir.root.mkdir()
    write(run_dir.fork, Fork("/runs/source", step, {}, 0.0))


def test_other_problems_are_refused_with_what_changed_and_the_two_ways_to_go_on(run_dir: RunDir) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_unchanged(run_dir, STEP, BEFORE, NOW)
    said = str(refused.value)
    assert "not those that the run had up to step 40" in said
    assert "`mrl resume mine`" in said and "`mrl fork mine@40`" in said
    assert said.endswith("Changed: environment 'sums': 1,499 problems instead of 1,500")


def test_a_fork_takes_the_problems_that_there_are_and_keeps_to_them(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    forked_at(run_dir, STEP)
    check_unchanged(run_dir, STEP, BEFORE, NOW)
    assert caplog.messages == [
        "goes on with other training problems than /runs/source: environment 'sums': 1,499 problems instead of 1,500"
    ]
    with pytest.raises(ConfigurationError, match="`mrl fork mine@48`"):
        check_unchanged(run_dir, STEP + 8, NOW, BEFORE)  # a checkpoint of its own


def test_the_same_problems_are_nothing_to_speak_of(run_dir: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    check_unchanged(run_dir, STEP, BEFORE, dict(reversed(BEFORE.items())))
    check_unchanged(run_dir, STEP, {}, NOW)  # a checkpoint that does not say
    assert not caplog.messages


def test_a_checkpoint_says_what_was_trained_on() -> None:
    counters = Counters(step=STEP, problems=BEFORE)
    assert Counters.of(json.loads(json.dumps(asdict(counters)))) == counters
    assert Counters.of({"step": STEP}) == Counters(step=STEP), "one that was written before it did"


def test_the_only_environment_goes_by_its_name() -> None:
    problem = Problem("1+2=", {})
    digest = ProblemDigest.of([problem])
    assert digests_of([TrainingSet("", 1.0, [problem])], "arithmetic") == {"arithmetic": digest}
    several = [TrainingSet(id, 1.0, [problem]) for id in ("sums", "puzzles")]
    assert digests_of(several, "multi-task") == {"sums": digest, "puzzles": digest}


def test_the_ranks_that_have_other_problems_than_most_fail(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> None:
    others = [BEFORE, BEFORE]

    def gather(of_ranks: list[Any], mine: Any, group: Any) -> None:
        of_ranks[:] = [mine, *(tuple(each.items()) for each in others)]

    monkeypatch.setattr(problems_module.dist, "all_gather_object", gather)
    control: Any = None
    with pytest.raises(
        RuntimeError, match=r"this rank has other training problems .*'sums': 1,499 problems instead of"
    ):
        check_alike(NOW, control)
    others = [NOW, BEFORE]
    check_alike(NOW, control)  # so this one is not to blame
