"""Programs as rollouts of a partitioned run: kills of a replica and of programs lose no prompt and invent no reward."""

from __future__ import annotations

import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from commands import Command
from exactly_once import fates
from json_files import read_json_lines
from optional import needs
from processes import environment, hit, wait_for, wait_for_step

from megatron_rl.contract.paths import RunDir

pytestmark = [pytest.mark.slow, needs("datasets"), needs("openai")]

STEPS, KILLS = 24, 3
ANSWERS = 8 * 4
RECIPE = (
    *("demo-program", "--cluster", "local", "job.nodes=3", "job.gpus_per_node=1", "placement.mode=partitioned"),
    *("placement.inference.nodes=2", "grpo.prompts_per_step=8", "grpo.group_size=4", f"training.steps={STEPS}"),
    *("evaluation.every=0", "save.every=8", "model.supervised.steps=60"),
)


@pytest.mark.timeout(900)
def test_killed_replica_and_killed_programs_lose_no_prompt_and_no_reward_is_invented(tmp_path: Path) -> None:
    chance, run = random.Random(5), RunDir(tmp_path / "run")
    command = Command(["mrl-submit", *RECIPE, "--run-dir", run.root], env=environment(tmp_path))
    try:
        for kill in range(KILLS):
            wait_for_step(run, 3 + 4 * kill, command)
            if kill == 1:
                hit(run, "megatron_rl.replica_main", signal.SIGKILL, chance)
            wait_for(lambda: kill_a_program(run, chance) or command.poll() is not None)
        wait_for(lambda: command.poll() is not None)
    finally:
        command.kill()
    assert run.done.exists(), "".join(command.communicate())
    lines = read_json_lines(run.metrics)
    assert len(lines) == STEPS
    assert sorted(fates(run)) == list(range(8 * STEPS))
    failed = sum(line["failed_rollouts"] for line in lines)
    assert 1 <= failed <= KILLS  # a program that had just ended was not hit
    assert sum(line["answers"] for line in lines) + failed == ANSWERS * STEPS
    log = "".join(file.read_text(errors="replace") for file in run.root.glob("logs/attempt-*/train.*.log"))
    assert "SIGKILL" in log, log


def kill_a_program(run: RunDir, chance: random.Random) -> bool:
    """Kill a program of a run that asks the model. Returns whether there was one."""
    for nursery in nurseries(run):
        with suppress(psutil.Error):  # it has ended in the meantime
            programs = [program for supervisor in nursery.children() for program in supervisor.children()]
            if programs:
                chance.choice(programs).kill()
                return True
    time.sleep(0.01)
    return False


def nurseries(run: RunDir) -> list[psutil.Process]:
    """Processes that start the programs of the run's ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "megatron_rl.rank_main" in words and str(run.root) in words:
            for child in process.children():
                with suppress(psutil.Error):
                    found += [child] * ("megatron_rl.agent.environments.program.nursery" in child.cmdline())
    return found
