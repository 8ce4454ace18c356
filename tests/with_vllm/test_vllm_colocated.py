"""Whole local runs whose vLLMs share their devices with the training ranks: each prompt is trained once, with the
trainer's log-probs, whatever ends whichever process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from exactly_once import fates
from loop_helpers import lines_of
from vllm_front import LIMIT_S, PYTHON_VARIABLE, START_S, LocalRun, until
from vllm_training import CLOSE

from launcher.host.record.ledger import ends_in, read_ledger

PROMPTS, SAMPLES = 8, 8


def recipe(ranks: int, steps: int, *words: str) -> tuple[str, ...]:
    """The demo in fp32 with heads of a size that vLLM has on CPUs."""
    return (
        *("demo", f"job.gpus_per_node={ranks}", "inference.engine=vllm", "job.backoff_s=1"),
        *(f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}", "inference.max_batch=32"),
        *("model.num_attention_heads=2", "model.num_query_groups=2"),
        *(f"grpo.prompts_per_step={PROMPTS}", f"grpo.group_size={SAMPLES}", f"training.steps={steps}"),
        *("evaluation.every=0", "save.every=4", f"job.silence_limit_s={int(START_S)}", *words),
    )


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., LocalRun]]:
    """Begins a run, which ends with the test."""
    runs: list[LocalRun] = []

    def begun(*words: str) -> LocalRun:
        runs.append(LocalRun(tmp_path / "run", *words))
        return runs[-1]

    yield begun
    for run in runs:
        for command in run.commands:
            command.kill()


def assert_exact(run: LocalRun, max_lag: int = 0) -> None:
    lines = lines_of(run.dir.metrics)
    assert len(fates(run.dir)) == len(lines) * PROMPTS
    assert max(line["staleness_max"] for line in lines) <= max_lag
    worst = "inference_logprob_difference_max"
    assert max(line[worst] for line in lines if line["staleness_max"] == 0) < CLOSE


def engine_of(run: LocalRun, replica: int) -> psutil.Process:
    children = run.front(replica).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def rank_of(run: LocalRun) -> psutil.Process:
    """A training rank of the run's newest attempt."""
    wanted = ["--run-dir", str(run.dir.root), "--attempt", str(run.dir.last_attempt())]
    ranks = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-4:] == wanted]
    return next(each for each in ranks if "megatron_rl.rank_main" in each.cmdline())


def test_the_only_vllm_its_front_and_the_rank_beside_it_are_killed_one_after_the_other(
    begin: Callable[..., LocalRun],
) -> None:
    run = begin(*recipe(1, 100_000, "placement.offload=optimizer", "optimizer.decay=constant"))
    run.wait_for_step(3)
    starts = run.starts(0)
    engine_of(run, 0).kill()
    until(lambda: run.starts(0) > starts, f"another start after the engine\n{run.log()}", LIMIT_S, run.check)
    run.wait_for_step(run.step + 3)
    run.front(0).kill()
    run.wait_for_step(run.step + 3)
    assert run.dir.last_attempt() == 1, "a vLLM that dies ends no rank"
    rank_of(run).kill()
    assert run.end() == 1, run.log()
    run.start("mrl", "resume", str(run.dir.root))
    until(lambda: run.dir.last_attempt() == 2, "another attempt", LIMIT_S, run.check)
    step = run.step
    until(lambda: run.step > step + 3, f"steps of the second attempt\n{run.log()}", LIMIT_S, run.check)
    run.drain()
    assert_exact(run)


@pytest.mark.parametrize(
    ("offload", "max_lag", "tp"), [("optimizer", 1, 1), ("buffers", 0, 2), pytest.param("none", 1, 1)]
)
def test_a_drained_run_of_two_ranks_resumes(
    begin: Callable[..., LocalRun], offload: str, max_lag: int, tp: int
) -> None:
    steps = 16
    words = f"placement.offload={offload}", f"async.max_lag={max_lag}", f"placement.training.tp={tp}"
    run = begin(*recipe(2, steps, *words))
    run.wait_for_step(6)
    run.drain()
    assert 6 <= run.step < steps
    run.start("mrl", "resume", str(run.dir.root))
    assert run.end() == 0, run.log()
    assert [end.outcome for end in ends_in(read_ledger(run.dir))] == ["drained", "finished"]
    assert_exact(run, max_lag)
