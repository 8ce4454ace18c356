"""Whole runs on two ranks: their record, which is the same after any interruption."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, outcome_of, prepare, read_error, reproducible
from optional import needs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from launcher.job.forked_run import PlannedFork, fill
from launcher.recipe.load import load_recipe
from megatron_rl.contract.attempt_records import Outcome
from megatron_rl.contract.codes import EXIT_CONFIG, EXIT_CRASHED, EXIT_DRAINED, FINISHED
from megatron_rl.contract.manifest import read_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts
from megatron_rl.rank.metrics.names import STEP_METRICS

STEPS = 16


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunDir:
    run_dir = prepare(tmp_path_factory.mktemp("runs") / "undisturbed", loop_recipe())
    attempt = Attempt(run_dir, cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return run_dir


@pytest.fixture(scope="module")
def scalars(undisturbed: RunDir) -> EventAccumulator:
    return EventAccumulator(str(undisturbed.tensorboard), size_guidance={"scalars": 0}).Reload()


# The record


def test_each_step_has_one_line_with_registered_names_and_finite_numbers(undisturbed: RunDir) -> None:
    lines = lines_of(undisturbed.metrics)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line.keys() - {"step"} <= STEP_METRICS.keys()
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, int | float))
    expected = {"mean_reward", "loss", "grad_norm", "entropy", "kl", "importance_weight", "time/log_probs_s"}
    assert all(expected <= line.keys() for line in lines)


def test_metrics_agree_with_the_recipe(undisturbed: RunDir) -> None:
    for line in lines_of(undisturbed.metrics):
        step = line["step"]
        assert (line["first_ordinal"], line["next_ordinal"]) == (5 * step - 5, 5 * step)
        assert line["policy_version"] == 2 * step  # two updates per step
        assert line["staleness_mean"] == line["staleness_max"] == 0
        assert line["inference_logprob_difference_max"] < 1e-4  # training and engine agree on every sampled token
        assert 0 <= line["mean_reward"] <= 1
        assert 1 <= line["answer_length_min"] <= line["answer_length"] <= line["answer_length_max"] <= 3
        assert line["failed_rollouts"] == line["skipped_updates"] == 0
        assert line["packed_tokens_ratio"] < 0.6  # four answers share a prompt
        phases = line["time/generate_s"] + line["time/train_s"]
        assert 0 < phases <= line["time/step_s"]
    rewards = {line["mean_reward"] for line in lines_of(undisturbed.metrics)}
    assert len(rewards) > 2  # otherwise nothing was trained


def test_evaluations_run_before_during_and_after_training(undisturbed: RunDir) -> None:
    lines = lines_of(undisturbed.evaluations)
    assert [line["step"] for line in lines] == [0, 8, 16]
    for line in lines:
        assert line.keys() == {"step", "eval/trained/greedy_accuracy", "eval/held_out/greedy_accuracy"}


@pytest.mark.parametrize(
    "name",
    [
        "mean_reward",
        "answer_length",
        "entropy",
        "clip_fraction",
        "kl",
        "grad_norm",
        "throughput/tokens_per_s",
        "time/generate_s",
        "time/train_s",
        "time/log_probs_s",
    ],
)
def test_tensorboard_shows_the_values_of_the_record(undisturbed: RunDir, scalars: EventAccumulator, name: str) -> None:
    events = scalars.Scalars(name)
    record = lines_of(undisturbed.metrics)
    assert [event.step for event in events] == [line["step"] for line in record]
    assert [event.value for event in events] == pytest.approx([line[name] for line in record], rel=1e-6)


def test_tensorboard_shows_evaluations(scalars: EventAccumulator) -> None:
    assert [event.step for event in scalars.Scalars("eval/held_out/greedy_accuracy")] == [0, 8, 16]


def test_the_groups_of_every_step_are_recorded_and_the_tokens_of_sampled_ones(undisturbed: RunDir) -> None:
    groups = [*read_rollouts(undisturbed, 1, STEPS)]
    assert [(group.step, group.ordinal) for group in groups] == [(1 + n // 5, n) for n in range(5 * STEPS)]
    for step, line in enumerate(lines_of(undisturbed.metrics), 1):
        rewards = [reward for group in groups if group.step == step for reward in group.rewards]
        assert sum(rewards) / len(rewards) == pytest.approx(line["mean_reward"], abs=1e-6)
    sampled = [group for group in groups if group.answers]
    assert sorted({group.step for group in sampled}) == [1, 6, 12, STEPS]
    sequences = [sequence for group in sampled for answer in group.answers for sequence in answer.sequences]
    assert all(
        sequence.pieces[:3] == [*group.prompt][:3] for group in sampled for sequence in group.answers[0].sequences
    )
    pairs = [pair for one in sequences for pair in zip(one.logprobs, one.trained_logprobs, strict=True)]
    scored = [(engine, trainer) for engine, trainer in pairs if trainer]
    assert scored and all(engine == pytest.approx(trainer, abs=2e-4) for engine, trainer in scored)


def test_finished_run_has_an_outcome_and_its_last_checkpoint(undisturbed: RunDir) -> None:
    assert outcome_of(undisturbed.attempt(1)) == Outcome(FINISHED, STEPS)
    assert undisturbed.checkpoint_steps()[0] == STEPS
    assert not undisturbed.attempt(1).errors()


# Interruptions


@pytest.mark.slow
def test_run_killed_at_any_moment_leaves_the_same_record(undisturbed: RunDir, tmp_path: Path, cache: Path) -> None:
    """All ranks are killed twice, each at a random moment after some step; then the run finishes. Profiled steps
    too have the same record."""
    profile = {"steps": [14, 15], "ranks": None, "generation": True}
    run_dir = prepare(tmp_path / "killed", loop_recipe(profile=profile))
    moments = random.Random(7)
    for step in (1, 9):
        attempt = Attempt(run_dir, cache)
        attempt.wait_for_step(step + moments.randrange(3))
        time.sleep(moments.uniform(0.0, 0.03))
        attempt.kill()
    last = Attempt(run_dir, cache)
    assert last.exit_codes() == [0, 0], last.logs()
    assert reproducible(run_dir) == reproducible(undisturbed)
    traces = {path.name for path in last.files.profile.iterdir()}
    names = ("generate.0", "generate.1", "train.0", "train.1")
    assert traces == {f"{name}.step-0000{step}.json.gz" for name in names for step in (14, 15)}
    events = EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0}).Reload().Scalars("mean_reward")
    assert [event.step for event in events] == list(range(1, STEPS + 1))


@needs("datasets", "math_verify")
def test_run_whose_data_were_edited_resumes_only_as_a_fork(tmp_path: Path, cache: Path) -> None:
    data = tmp_path / "sums.jsonl"
    rows = [json.dumps({"problem": f"{one}+{other}=", "answer": one + other}) for one in range(6) for other in range(6)]
    data.write_text("\n".join(rows))
    sums = {"name": "math", "args": {"train": {"path": str(data)}, "prompt": "{question}"}}
    of_a_long_run = loop_recipe(
        job={"gpus_per_node": 1},
        model={"init": "from-scratch"},
        environment=sums,
        training={"steps": 9999},
        evaluation={"every": 0},
    )
    run_dir = prepare(tmp_path / "run", of_a_long_run)
    first = Attempt(run_dir, cache, ranks=1)
    first.wait_for_step(2)
    os.kill(first.processes[0].pid or 0, signal.SIGUSR1)
    assert first.exit_codes() == [EXIT_DRAINED], first.logs()
    (step, *_), record = run_dir.checkpoint_steps(), run_dir.metrics.read_bytes()

    data.write_text("\n".join(rows[1:]))
    second = Attempt(run_dir, cache, ranks=1)
    assert second.exit_codes() == [EXIT_CONFIG], second.logs()
    error = read_error(second, 0)["error"]
    assert "environment 'math': 35 problems instead of 36" in error
    assert f"`mrl fork run@{step}`" in error
    assert (run_dir.checkpoint_steps()[0], run_dir.metrics.read_bytes()) == (step, record)

    fork = prepare(tmp_path / "fork", of_a_long_run | {"training": of_a_long_run["training"] | {"steps": step + 1}})
    fill(PlannedFork(run_dir, step, load_recipe("demo"), ()), fork)
    third = Attempt(fork, cache, ranks=1)
    assert third.exit_codes() == [0], third.logs()
    assert [line["step"] for line in lines_of(fork.metrics)] == list(range(1, step + 2))
    assert read_manifest(fork.checkpoint(step + 1)).meta["problems"]["math"]["problems"] == 35


# Failures


def test_failing_rank_reports_its_error_and_ends_the_others(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "failing", loop_recipe())
    attempt = Attempt(run_dir, cache, sabotage=_fail_in_step_3_of_rank_1)
    assert attempt.exit_codes() == [EXIT_CRASHED] * 2, attempt.logs()
    error = read_error(attempt, 1)
    assert (error["rank"], error["step"], error["phase"]) == (1, 3, "training")
    assert error["error"].startswith("RuntimeError: the device fell off the bus (test_loop.py:")
    assert "in fails" in error["traceback"]
    assert error["exit_code"] == EXIT_CRASHED
    assert outcome_of(attempt.files) is None
    assert [line["step"] for line in lines_of(run_dir.metrics)] == [1, 2]


def test_rank_with_other_problems_than_the_others_fails(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "run", loop_recipe(model={"init": "from-scratch"}))
    attempt = Attempt(run_dir, cache, sabotage=_forget_a_problem_on_rank_1)
    assert attempt.exit_codes() == [EXIT_CRASHED] * 2, attempt.logs()
    error = read_error(attempt, 1)["error"]
    assert re.search(r"this rank has other training problems .* environment 'arithmetic': \d+ problems instead", error)
    assert not run_dir.metrics.exists()


def test_persistently_non_finite_gradients_stop_the_run_before_a_bad_save(tmp_path: Path, cache: Path) -> None:
    run_dir = prepare(tmp_path / "not-finite", loop_recipe(save={"every": 1}))
    attempt = Attempt(run_dir, cache, ranks=1, sabotage=_spoil_gradients_from_step_3)
    assert attempt.exit_codes() == [EXIT_CRASHED], attempt.logs()
    assert read_error(attempt, 0)["error"].startswith("GradientsNotFinite: 3 updates in a row")
    lines = lines_of(run_dir.metrics)
    assert [(line["step"], line["skipped_updates"], "grad_norm" in line) for line in lines] == [
        (1, 0, True),
        (2, 0, True),
        (3, 2, False),
    ]
    assert lines[2]["policy_version"] == 4


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"environment": {"name": "arithmetics"}}, "did you mean 'arithmetic'"),
        ({"environment": {"args": {"min_digits": 30, "max_digits": 30}}}, "nothing is left to train on"),
    ],
    ids=["unknown environment", "prompt too long"],
)
def test_recipe_that_cannot_run_exits_with_the_configuration_code(
    tmp_path: Path, cache: Path, sections: dict[str, Any], complaint: str
) -> None:
    recipe = loop_recipe(job={"gpus_per_node": 1}, model={"init": "from-scratch"}, **sections)
    attempt = Attempt(prepare(tmp_path / "run", recipe), cache, ranks=1)
    assert attempt.exit_codes() == [EXIT_CONFIG], attempt.logs()
    assert complaint in read_error(attempt, 0)["error"]


def test_unsupported_megatron_core_is_one_clear_error(tmp_path: Path, cache: Path) -> None:
    attempt = Attempt(prepare(tmp_path / "run", loop_recipe()), cache, ranks=1, sabotage=_expect_another_megatron_core)
    assert attempt.exit_codes() == [EXIT_CONFIG], attempt.logs()
    error = read_error(attempt, 0)["error"]
    assert "is not supported: install 'megatron-core>=0.1.0,<0.2'" in error


# Sabotage, which runs in the processes of the ranks


def _fail_in_step_3_of_rank_1(rank: int) -> None:
    from megatron_rl.learn.training.trainer import Trainer

    train = Trainer.train

    def fails(self: Any, batch: Any, step: int, **others: Any) -> Any:
        if rank == 1 and step == 3:
            raise RuntimeError("the device fell off the bus")
        return train(self, batch, step, **others)

    Trainer.train = fails  # type: ignore[method-assign]


def _forget_a_problem_on_rank_1(rank: int) -> None:
    from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment

    problems = ArithmeticEnvironment.training_problems
    if rank == 1:
        ArithmeticEnvironment.training_problems = lambda self: problems(self)[1:]  # type: ignore[method-assign]


def _spoil_gradients_from_step_3(rank: int) -> None:
    from megatron_rl.learn.training.trainer import Trainer

    train = Trainer.train

    def spoiled(self: Any, batch: Any, step: int, **others: Any) -> Any:
        if step == 3:
            self.policy.decoder.final_layernorm.weight.register_hook(lambda gradient: gradient * math.nan)
        return train(self, batch, step, **others)

    Trainer.train = spoiled  # type: ignore[method-assign]


def _expect_another_megatron_core(rank: int) -> None:
    from megatron_rl.model.platform import select

    select.SUPPORTED_MEGATRON = ((0, 1, 0), (0, 2, 0))
