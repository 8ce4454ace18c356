"""A vLLM over two "nodes", which are two processes of ours on this machine: whole local runs."""

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
from megatron_rl.contract.paths import NUMBER_OPTIONS

PROMPTS = 5
MODELS = {
    "dense": (),
    "experts": (
        *("model.num_experts=4", "model.experts_per_token=2", "model.expert_ffn_hidden_size=32"),
        *("model.qkv_bias=false", "model.qk_norm=true", "model.tied_embeddings=false"),
    ),
}


def recipe(*model: str) -> tuple[str, ...]:
    """The demo in fp32: one node trains, two are one replica."""
    return (
        *("demo", "placement.mode=partitioned", "job.nodes=3", "job.gpus_per_node=1", "placement.inference.nodes=2"),
        *("placement.inference.tp=2", "placement.tp_across_nodes=true"),
        *("inference.engine=vllm", f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}", "inference.max_batch=16"),
        *("model.num_attention_heads=2", "model.num_query_groups=2", "resume.partial=keep"),
        *(f"grpo.prompts_per_step={PROMPTS}", "grpo.group_size=4", "training.steps=100000", "optimizer.decay=constant"),
        *("evaluation.every=0", f"job.silence_limit_s={int(START_S)}", *model),
    )


@pytest.fixture
def started() -> Iterator[list[LocalRun]]:
    """Runs, which end with the test."""
    runs: list[LocalRun] = []
    yield runs
    for run in runs:
        for command in run.commands:
            command.kill()


def follower(run: LocalRun) -> psutil.Process:
    """Our process on the second node of the replica."""
    wanted = ["--run-dir", str(run.dir.root), "--attempt", "1", NUMBER_OPTIONS["infer"], "0"]
    found = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-6:] == wanted]
    (second,) = [each for each in found if each.environ()["RANK"] == "1"]
    return second


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_killed_follower_ends_its_replica_alone(
    tmp_path: Path, started: list[LocalRun], model: tuple[str, ...]
) -> None:
    """The training ranks wait for the replica, which comes back, and each prompt is trained once."""
    run = LocalRun(tmp_path / "run", *recipe(*model))
    started.append(run)
    run.wait_for_step(2)
    follower(run).kill()
    until(lambda: run.starts(0) == 2, f"another start\n{run.log()}", LIMIT_S, run.check)
    why = read_replicas(run.dir.attempt(1))[0].why or ""
    assert "rank 1" in why, why
    run.wait_for_step(run.step + 2)
    run.drain()
    assert run.dir.last_attempt() == 1
    lines = lines_of(run.dir.metrics)
    assert len(fates(run.dir)) == len(lines) * PROMPTS
    assert max(line["inference_logprob_difference_max"] for line in lines) < CLOSE
