"""A run on a real Slurm with vLLM in its replicas: preempted and hit at random, it trains each prompt once."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from exactly_once import fates
from vllm_front import PYTHON_VARIABLE, START_S, until

sys.path.append(str(Path(__file__).parents[1] / "slurm"))
from lab import Cluster, missing
from login import Login
from records import kill_rank, preempt, wait_for_ends

LIMIT_S = 2 * START_S  # a start, and the run after it
PROMPTS = 5
RECIPE = (
    *("demo", "--cluster", "real", "job.gpus_per_node=1"),
    *("inference.engine=vllm", "inference.max_batch=16", "resume.partial=keep"),
    *("model.num_attention_heads=2", "model.num_query_groups=2", "model.supervised.steps=60"),
    *(f"grpo.prompts_per_step={PROMPTS}", "grpo.group_size=4", "training.steps=100000", "evaluation.every=0"),
    *("async.max_lag=1", "save.every=4", "job.backoff_s=1", "job.silence_limit_s=300"),
)
PARTITIONED = ("job.nodes=3", "placement.mode=partitioned", "placement.inference.nodes=2")
COLOCATED = ("job.nodes=2", "placement.mode=colocated", "placement.offload=optimizer")


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    """A user of a cluster that ends with the test."""
    if (reason := missing(False)) is not None:
        pytest.skip(reason)
    lab = Cluster().up()
    try:
        with Login(lab, tmp_path / "home", tmp_path / "share") as login:
            login.profiles["real"] |= {"health_check": False, "environment": {"MRL_CACHE": str(lab.cache)}}
            yield login
    finally:
        lab.down()


@pytest.mark.timeout(1800)
def test_a_vllm_over_two_nodes_comes_back_alone_after_its_follower_was_killed(login: Login) -> None:
    large = ("placement.inference.tp=2", "placement.tp_across_nodes=true")
    run = login.submit(*RECIPE, *PARTITIONED, *large, f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}")
    run.wait_for_step(2, LIMIT_S)
    until(lambda: kill_rank(run, 1, "infer-0"), "there is a follower to kill", LIMIT_S)
    run.wait_for_step(len(run.metrics()) + 3, LIMIT_S)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED", limit=LIMIT_S)
    assert run.ends() == [("stopped", "cancelled")], run.log()
    assert len(fates(run.dir)) == len(run.metrics()) * PROMPTS


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", [PARTITIONED, COLOCATED], ids=["partitioned", "colocated"])
def test_run_preempted_twice_with_a_replica_killed_at_random_trains_each_prompt_once(
    login: Login, placement: tuple[str, ...]
) -> None:
    run = login.submit(*RECIPE, *placement, f"inference.vllm.python={os.environ[PYTHON_VARIABLE]}")
    chance = random.Random(3)
    for preemption in (1, 2):
        run.wait_for_step(len(run.metrics()) + 6, LIMIT_S)
        time.sleep(chance.uniform(0.0, 2.0))
        replica = chance.randrange(2)
        until(lambda replica=replica: kill_rank(run, 0, f"infer-{replica}"), "there is a replica to kill", LIMIT_S)
        run.wait_for_step(len(run.metrics()) + 2, LIMIT_S)
        urgent = preempt(login, run)
        wait_for_ends(run, preemption)
        login.lab.run("scancel", urgent)
    run.wait_for_step(len(run.metrics()) + 6, LIMIT_S)
    login.call("mrl", "cancel", "--drain", run.dir.root)
    run.wait("COMPLETED", limit=LIMIT_S)
    assert run.ends() == [("drained", "preempted")] * 2 + [("stopped", "cancelled")], run.log()
    assert len(fates(run.dir)) == len(run.metrics()) * PROMPTS
    assert max(line["staleness_max"] for line in run.metrics()) <= 1
