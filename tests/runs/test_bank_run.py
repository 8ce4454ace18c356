"""A whole run on two ranks leaves on request while it generates, and the next attempt resumes on one rank."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, prepare

from megatron_rl.contract.codes import EXIT_DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.rollout.bank.file import bank_file, bank_files, scan

RECIPE: dict[str, Any] = {
    "model": {"init": "from-scratch"},
    "inference": {"max_batch": 2},
    "sampling": {"max_new_tokens": 6},
    "training": {"steps": 4},
    "save": {"every": 0},
    "resume": {"partial": "keep", "flush_s": 0.05},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_dir = prepare(folder / "run", loop_recipe(**RECIPE))
    attempt = Attempt(run_dir, folder)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return run_dir


@pytest.mark.slow
def test_run_that_left_during_generation_resumes_unfinished_answers(undisturbed: RunDir, tmp_path: Path) -> None:
    run_dir = prepare(tmp_path / "run", loop_recipe(**RECIPE))
    first = Attempt(run_dir, tmp_path, sabotage=_generate_slowly)
    first.wait_for_step(2)
    time.sleep(0.5)
    os.kill(first.processes[0].pid or 0, signal.SIGTERM)
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    assert bank_files(run_dir.bank) == [bank_file(run_dir.bank, 1, driver) for driver in (0, 1)]
    second = Attempt(run_dir, tmp_path, ranks=1)
    assert second.exit_codes() == [0], second.logs()
    found = re.search(r"bank: (\d+) scored groups and (\d+) answers of earlier attempts", second.logs())
    assert found, second.logs()
    assert sum(map(int, found.groups())) > 1
    record, expected = (lines_of(each.metrics) for each in (run_dir, undisturbed))
    for line, other in zip(record, expected, strict=True):
        assert (line["step"], line["next_ordinal"]) == (other["step"], other["next_ordinal"])
        for name in ("mean_reward", "answer_length", "entropy"):
            assert line[name] == pytest.approx(other[name], rel=1e-3), (line["step"], name)
    # The last checkpoint settled every prompt, and the first driver deleted the bank files of the first attempt.
    kinds = {entry.head["kind"] for path in bank_files(run_dir.bank) for entry in scan(path)[0]}
    assert kinds == {"attempt"}
    assert bank_files(run_dir.bank) == [bank_file(run_dir.bank, 2, 0)]


EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32, "router_replay": "rollout"}


@pytest.mark.slow
def test_resumed_answers_and_groups_have_the_choices_of_experts_of_the_attempt_that_sampled_them(
    tmp_path: Path,
) -> None:
    model = {"init": "from-scratch", "tied_embeddings": False, **EXPERTS}
    run_dir = prepare(tmp_path / "run", loop_recipe(**RECIPE | {"model": model}))
    first = Attempt(run_dir, tmp_path, sabotage=_generate_slowly)
    first.wait_for_step(2)
    time.sleep(0.5)
    os.kill(first.processes[0].pid or 0, signal.SIGTERM)
    assert first.exit_codes() == [EXIT_DRAINED] * 2, first.logs()
    heads = [entry.head for path in bank_files(run_dir.bank) for entry in scan(path)[0]]
    assert all("choices" in head for head in heads if head["kind"] != "attempt")
    assert {head["kind"] for head in heads} > {"attempt"}
    second = Attempt(run_dir, tmp_path, ranks=1)
    assert second.exit_codes() == [0], second.logs()
    lines = lines_of(run_dir.metrics)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["router_replay_missing"] for line in lines] == [0] * 4
    assert all(line["router_replay_differing"] < 0.01 for line in lines)  # one model in fp32 on both sides
    assert all(line["inference_logprob_difference_max"] < 1e-4 for line in lines)


def _generate_slowly(rank: int) -> None:
    from megatron_rl.generate.engine.engine import Engine

    step = Engine.step

    def slow(self: Engine) -> None:
        time.sleep(0.03)
        step(self)

    Engine.step = slow  # type: ignore[method-assign]
