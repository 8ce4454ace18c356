"""Whole local runs whose replicas have vLLM: each prompt is trained once, whatever ends their processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from exactly_once import fates
from loop_helpers import lines_of
from vllm_front import LIMIT_S, PYTHON_VARIABLE, START_S, LocalRun, until
from vllm_training import CLOSE

from launcher.host.record.evidence import read_replicas
from launcher.host.record.ledger import ends_in, read_ledger

PROMPTS = 8
SAMPLES = 8


def recipe(replicas: int, steps: int, max_lag: int) -> tuple[str, ...]:
    """The demo in fp32, one training rank, heads of a size that vLLM has on CPUs."""
    return (
        *("demo", "placement.mode=partitioned", f"job.nodes={1 + replicas}", "job.gpus_per_node=1"),
        *(f"placement.inference.nodes={replicas}", "inference.engine=vllm", "resume.partial=keep"),
        *(f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}", "inference.max_batch=32"),
        *("model.num_attention_heads=2", "model.num_query_groups=2"),
        *(f"grpo.prompts_per_step={PROMPTS}", f"grpo.group_size={SAMPLES}", f"async.max_lag={max_lag}"),
        *(f"training.steps={steps}", "evaluation.every=0", "save.every=20", f"job.silence_limit_s={int(START_S)}"),
    )


@pytest.fixture
def started() -> Iterator[list[LocalRun]]:
    """Runs, which end with the test."""
    runs: list[LocalRun] = []
    yield runs
    for run in runs:
        for command in run.commands:
            command.kill()


def assert_exact(run: LocalRun, steps: int, max_lag: int) -> None:
    """Check that each prompt was trained once, by tokens no older than allowed, with the trainer's log-probs."""
    lines = lines_of(run.dir.metrics)
    assert len(fates(run.dir)) == steps * PROMPTS
    assert max(line["staleness_max"] for line in lines) <= max_lag
    worst = "inference_logprob_difference_max"
    assert max(line[worst] for line in lines if line["staleness_max"] == 0) < CLOSE


@pytest.mark.parametrize("max_lag", [0, 1])
def test_drained_run_resumes_and_trains_each_prompt_once(tmp_path: Path, started: list[LocalRun], max_lag: int) -> None:
    steps = 30
    profile = "profile={steps: [3, 4], generation: true}"
    run = LocalRun(tmp_path / "run", *recipe(1, steps, max_lag), profile)
    started.append(run)
    run.wait_for_step(8)
    traces = sorted(path.name for path in run.dir.attempt(1).profile.glob("infer-0.step-*_rank0.*.json.gz"))
    # Releases before 0.32 name all traces of a start after the first one.
    assert [name.partition("_")[0][-6:] for name in traces] in (["000003", "000004"], ["000003", "000003"])
    run.drain()
    drained = run.step
    assert 8 <= drained < steps
    run.start("mrl", "resume", str(run.dir.root))
    assert run.end() == 0, run.log()
    assert [end.outcome for end in ends_in(read_ledger(run.dir))] == ["drained", "finished"]
    assert_exact(run, steps, max_lag)


FAULTS = {"front": "SIGKILL", "server": "vLLM has ended (signal SIGKILL)", "engine": "VllmGone: vLLM "}
"""Process that is killed, and a part of the reason that is reported. After its engine has died vLLM's server refuses
calls, closes its socket and ends, within seconds: the reason is one of these."""


def test_training_continues_while_the_processes_of_a_replica_die_one_after_the_other(
    tmp_path: Path, started: list[LocalRun]
) -> None:
    """The other replica answers meanwhile, and the one that was hit comes back."""
    steps = 100_000
    run = LocalRun(tmp_path / "run", *recipe(2, steps, 1), "optimizer.decay=constant")
    started.append(run)
    until(lambda: run.step and run.replicas() == 2, f"two replicas answer\n{run.log()}", LIMIT_S, run.check)
    reasons = {}
    for number, process in enumerate(FAULTS):
        reasons[process] = reason_after(run, number % 2, process)
    for process, reason in FAULTS.items():
        assert reason in reasons[process], reasons
    run.drain()
    assert_exact(run, run.step, max_lag=1)


def reason_after(run: LocalRun, replica: int, process: str) -> str:
    """Kill a process of a replica, see training continue and the replica come back. Returns the reported reason."""
    starts = run.starts(replica)
    kill(run.front(replica), process)
    run.wait_for_step(run.step + 3)
    until(lambda: run.starts(replica) > starts, f"another start after the {process}\n{run.log()}", LIMIT_S, run.check)
    run.wait_for_step(run.step + 2)
    until(lambda: run.replicas() == 2, f"two replicas answer after the {process}\n{run.log()}", LIMIT_S, run.check)
    return read_replicas(run.dir.attempt(1))[replica].why or ""


def kill(front: psutil.Process, what: str) -> None:
    """Kill one process of a replica."""
    (guard,) = front.children()
    server = next(child for child in guard.children())
    engine = next(child for child in front.children(recursive=True) if "EngineCore" in " ".join(child.cmdline()))
    {"front": front, "server": server, "engine": engine}[what].kill()
