"""A partitioned run on this machine with faults at random moments records the same as an undisturbed one, and ends
every prompt once."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from commands import Command, run
from exactly_once import fates
from json_files import read_json_lines
from loop_helpers import reproducible
from processes import LIMIT_S, environment, hit, processes, wait_for, wait_for_step

from megatron_rl.contract.paths import RunDir

STEPS = 80
BLOWS = 6
RECIPE = ("demo", "--cluster", "local", "job.gpus_per_node=1", f"training.steps={STEPS}", "save.every=20")
COLOCATED = (*RECIPE, "job.nodes=1")
REPLICA = "megatron_rl.replica_main"
WEAPONS = (
    (REPLICA, signal.SIGKILL),
    (REPLICA, signal.SIGTERM),
    ("megatron_rl.rank_main", signal.SIGKILL),
    ("launcher.host.supervise", signal.SIGKILL),
    ("launcher.host.supervise", signal.SIGTERM),
)
PARTITIONED = (*RECIPE, "job.nodes=3", "placement.mode=partitioned", "placement.inference.nodes=2")


def survives(command: Command, run: RunDir, blows: list[tuple[str, int]], chance: random.Random) -> None:
    """Apply faults, removing them from the list, until one ends the command or none is left; wait for its end."""
    while blows and command.poll() is None:
        wait_for_step(run, len(read_json_lines(run.metrics)) + chance.randint(2, 12), command)
        module, signum = blows.pop()
        hit(run, module, signum, chance)
        if module != REPLICA:
            break
    wait_for(lambda: command.poll() is not None)
    wait_for(lambda: not processes(run.root, REPLICA))


def harmed_run(tmp_path: Path, seed: int, *overrides: str) -> RunDir:
    """Run partitioned, with faults until it ends. Every prompt must end once."""
    chance, harmed = random.Random(seed), RunDir(tmp_path / "harmed")
    blows = [chance.choice(WEAPONS) for _ in range(BLOWS)]
    for _ in range(BLOWS + 1):
        words = ["mrl-submit", *PARTITIONED, *overrides, "--run-dir", harmed.root]
        command = Command(words, env=environment(tmp_path))
        try:
            survives(command, harmed, blows, chance)
        finally:
            command.kill()
        out, err = command.communicate(timeout=LIMIT_S)
        if harmed.done.exists():
            break
    assert harmed.done.exists(), out + err
    found = fates(harmed)
    assert sorted(found) == list(range(len(found)))
    return harmed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_partitioned_run_with_random_faults_ends_as_if_undisturbed(tmp_path: Path, seed: int) -> None:
    alone = RunDir(tmp_path / "alone")
    done = run(["mrl-submit", *COLOCATED, "--run-dir", alone.root], LIMIT_S, env=environment(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert reproducible(harmed_run(tmp_path, seed)) == reproducible(alone)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("seed", "max_lag"), [(2, 1), (3, 2)])
def test_run_with_generation_ahead_keeps_its_bound_too(tmp_path: Path, seed: int, max_lag: int) -> None:
    harmed = harmed_run(tmp_path, seed, "resume.partial=keep", f"async.max_lag={max_lag}")
    steps = read_json_lines(harmed.metrics)
    prompts = steps[0]["next_ordinal"]
    assert [line["first_ordinal"] for line in steps] == [prompts * index for index in range(STEPS)]
    assert max(line["staleness_max"] for line in steps) == max_lag
