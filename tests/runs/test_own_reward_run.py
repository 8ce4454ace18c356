"""Whole runs with a reward function of the user's: the same record in every placement and after a drain in the middle
of an answer, and an end with file and line when it returns no reward."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from exactly_once import fates
from loop_helpers import Attempt, loop_recipe, outcome_of, prepare, read_error, reproducible
from optional import needs
from processes import wait_for

from megatron_rl.contract.attempt_records import Drain, Progress
from megatron_rl.contract.codes import DRAINED, EXIT_CONFIG, EXIT_DRAINED, PREEMPTED
from megatron_rl.contract.records import read, write

pytestmark = needs("datasets")

REWARD = """
import asyncio, os, signal, time
from pathlib import Path

FOLDER = Path({folder!r})

def reward(response, prompt, **columns):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(60)
    if (FOLDER / "hang").exists() and prompt == "7+1=":
        (FOLDER / f"hanging.{{os.getpid()}}").touch()
        time.sleep(600)
    signal.alarm(0)
    if (FOLDER / "wrong").exists() and "7" in response:
        return None
    print("scored", response)
    return asyncio.run(asyncio.sleep(0, {{"digits": sum(map(str.isdigit, response)), "short": len(response) < 3}}))
"""


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD.format(folder=str(folder)))
    rows = [{"prompt": f"{number}+1="} for number in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = {"file": str(folder / "reward.py"), "train": str(folder / "rows.jsonl")}
    values = loop_recipe(
        job={"gpus_per_node": 1},
        training={"steps": 4},
        evaluation={"every": 0},
        save={"every": 2},
        environment={"name": "python", "args": arguments},
        grpo={"group_size": 2, "prompts_per_step": 3},
    )
    values["model"] |= {"init": "from-scratch"}
    return values | sections


@pytest.mark.slow
def test_a_partitioned_run_drained_in_the_middle_of_an_answer_has_the_record_of_a_colocated_one(tmp_path: Path) -> None:
    values = recipe(tmp_path)
    alone = Attempt(prepare(tmp_path / "alone", values), tmp_path / "cache", ranks=1)
    assert alone.exit_codes() == [0], alone.logs()
    (log,) = alone.run_dir.root.glob("log.1.*")
    assert "reward printed, scoring" in log.read_text()

    (tmp_path / "hang").touch()
    placement = {"mode": "partitioned", "training": {"tp": 1}, "inference": {"tp": 1, "nodes": 1}}
    apart = {"job": values["job"] | {"nodes": 2}, "placement": values["placement"] | placement}
    run_dir = prepare(tmp_path / "apart", recipe(tmp_path, **apart))
    first = Attempt(run_dir, tmp_path / "cache", ranks=1)
    first.start_replica(0)
    wait_for(lambda: [*tmp_path.glob("hanging.*")])
    wait_for(lambda: "training: reward (reward.py:7) takes" in read(Progress, first.files.progress).phase)
    now = time.time()
    write(first.files.drain, Drain(PREEMPTED, "test", now, now + 60))
    for process in [*first.processes, *first.replicas]:
        process.terminate()
    assert first.exit_codes(30) == [EXIT_DRAINED], first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None and outcome.outcome == DRAINED
    (hanging,) = tmp_path.glob("hanging.*")
    assert not psutil.pid_exists(int(hanging.suffix[1:]))

    (tmp_path / "hang").unlink()
    second = Attempt(run_dir, tmp_path / "cache", ranks=1)
    second.start_replica(0)
    assert second.exit_codes() == [0], second.logs()
    assert reproducible(run_dir) == reproducible(alone.run_dir)
    assert {*fates(run_dir).values()} == {1, 2, 3, 4}


def test_a_reward_that_returns_none_for_some_answers_ends_the_run_as_misconfigured(tmp_path: Path) -> None:
    """If these answers were lost, the run would train on the others and call their rewards its own."""
    (tmp_path / "wrong").touch()
    attempt = Attempt(prepare(tmp_path / "run", recipe(tmp_path)), tmp_path / "cache", ranks=1)
    assert attempt.exit_codes() == [EXIT_CONFIG], attempt.logs()
    error = read_error(attempt, 0)["error"]
    assert "reward.py:7: reward returned None: return a number" in error and "(for the answer '" in error
