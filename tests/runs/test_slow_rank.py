"""A run with a rank that is really slow: `mrl status` and `mrl explain` name it, and the phase in which it is slow."""

from __future__ import annotations

import json
from pathlib import Path

import commands
import pytest

from launcher.runs.slow_ranks import STEPS, read_slow_ranks
from megatron_rl.contract.paths import RunDir

SLEEPER = """
import os
import time

def loss(tokens, config):
    if os.environ.get("RANK") == "1":
        time.sleep(0.3)
    return -tokens.advantages * tokens.logprobs * tokens.weights
"""
"""A policy loss that keeps rank 1 asleep in each update."""


@pytest.mark.slow
def test_the_rank_that_sleeps_in_its_updates_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MRL_CACHE", str(cache))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("MRL_CLUSTER", raising=False)
    (tmp_path / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    steps = [f"training.steps={STEPS + 2}", "optimizer.warmup_steps=0", "evaluation.every=0"]
    words = ["mrl-submit", "demo", "--run-dir", "r", "grpo.policy_loss=sleeper:loss", *steps]
    done = commands.run(words, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *others = read_slow_ranks(RunDir(tmp_path / "r"))
    assert (first.phase, first.rank, first.steps) == ("train", 1, STEPS)
    assert first.share > 0.3
    assert {one.rank for one in others} <= {0, 1}  # under the load of other tests any rank may be slow in something
    status = commands.run(["mrl", "status", "r", "--json"])
    assert json.loads(status.stdout)["slow_ranks"][0]["seen"].startswith("rank 1 on ")
    explained = json.loads(commands.run(["mrl", "explain", "r", "--json"]).stdout)
    assert any(one["rule"] == "slow-rank" and "in train in 20 of 20" in one["seen"] for one in explained["findings"])
