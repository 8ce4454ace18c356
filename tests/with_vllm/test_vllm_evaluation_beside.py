"""Evaluations that replicas with vLLM answer beside training: each is recorded once, also if the run is killed in the
middle of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from exactly_once import fates
from loop_helpers import lines_of
from vllm_front import LIMIT_S, PYTHON_VARIABLE, START_S, LocalRun, until
from vllm_training import CLOSE

from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.manifest import read_manifest
from megatron_rl.contract.paths import RunDir

STEPS, EVERY, PROMPTS = 9, 3, 4


@pytest.fixture
def started() -> Iterator[list[LocalRun]]:
    """Runs, which end with the test."""
    runs: list[LocalRun] = []
    yield runs
    for run in runs:
        for command in run.commands:
            command.kill()


def pending(run_dir: RunDir) -> bool:
    """Whether a published checkpoint says that an evaluation is not recorded yet."""
    steps = run_dir.checkpoint_steps() if run_dir.checkpoints.exists() else []
    return any(read_manifest(run_dir.checkpoint(step)).meta["evaluating"] is not None for step in steps)


def test_training_goes_on_and_a_killed_run_repeats_the_evaluation(tmp_path: Path, started: list[LocalRun]) -> None:
    run = LocalRun(
        tmp_path / "run",
        *("demo", "placement.mode=partitioned", "job.nodes=3", "job.gpus_per_node=1", "placement.inference.nodes=2"),
        *("inference.engine=vllm", f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}", "inference.max_batch=8"),
        *("model.num_attention_heads=2", "model.num_query_groups=2", "resume.partial=keep", "async.max_lag=1"),
        *(f"grpo.prompts_per_step={PROMPTS}", "grpo.group_size=4", f"training.steps={STEPS}", "save.every=1"),
        *(f"evaluation.every={EVERY}", "evaluation.replicas=1", "evaluation.samples=16", "evaluation.temperature=1.0"),
        f"job.silence_limit_s={int(3 * START_S)}",
    )
    started.append(run)
    until(lambda: pending(run.dir), f"an evaluation is begun\n{run.log()}", 2 * LIMIT_S, run.check)
    before = run.step
    until(lambda: run.step > before or not pending(run.dir), "training goes on", LIMIT_S, run.check)
    until(lambda: pending(run.dir), f"an evaluation is under way\n{run.log()}", LIMIT_S, run.check)
    run.commands[-1].kill()
    recorded = [line["step"] for line in lines_of(run.dir.evaluations)]
    assert len(recorded) < 1 + STEPS // EVERY
    run.start("mrl", "resume", str(run.dir.root))
    assert run.end() == 0, run.log()
    assert [end.outcome for end in ends_in(read_ledger(run.dir))][-1] == "finished"
    assert len(fates(run.dir)) == STEPS * PROMPTS
    evaluations = lines_of(run.dir.evaluations)
    assert [line["step"] for line in evaluations] == [*range(0, STEPS + 1, EVERY)]
    failed = [value for line in evaluations for name, value in line.items() if name.endswith("failed_rollouts")]
    assert not any(failed)
    lines = lines_of(run.dir.metrics)
    worst = "inference_logprob_difference_max"
    assert max(line[worst] for line in lines if line["staleness_max"] == 0) < CLOSE
