"""The process of the environment `verifiers`, and its protocol. A script takes the place of the worker here;
tests/with_verifiers has the real one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from megatron_rl.agent.environments.vf import worker_process
from megatron_rl.agent.environments.vf.verifiers_environment import VerifiersConfig, merged
from megatron_rl.agent.environments.vf.worker_process import VerifiersWorker, WorkerGone, list_tasks
from megatron_rl.recipe.environment_section import EnvironmentConfig
from megatron_rl.recipe.registry import environment_arguments

SCRIPT = f"""#!{sys.executable}
import json, os, subprocess, sys, threading, time
request = json.loads(sys.stdin.readline())
nothing = subprocess.DEVNULL
def write(reply):
    print(json.dumps(reply), flush=True)
if GREETING is None:
    sys.exit()
write({{"number": 0, "version": "0.4.0", "prompts": {{"train": ["one", "two"]}}, **GREETING}})
for line in sys.stdin if not request["prompts"] else ():
    asked = json.loads(line)
    task = asked.get("task")
    if task == "pid":
        write({{"number": asked["number"], "reward": os.getpid()}})
    elif task == "child":
        child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdin=nothing, stdout=nothing)
        write({{"number": asked["number"], "reward": child.pid}})
    elif task == "die":
        os._exit(7)
    elif task == "cancelled":
        write({{"number": asked["number"], "reward": last}})
    elif "cancel" in asked:
        last = asked["cancel"]
        write({{"number": last, "lost": "cancelled"}})
    elif task == "stick":
        time.sleep(300)
"""


def script(folder: Path, greeting: dict[str, Any] | None = {}) -> str:  # noqa: B006 - not changed
    """A program that can be named as the Python of a worker."""
    file = folder / "python"
    file.write_text(SCRIPT.replace("GREETING", repr(greeting)))
    file.chmod(0o700)
    return str(file)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 60.0))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def asked(worker: VerifiersWorker, task: str) -> Any:
    return (await worker.run({"task": task}))["reward"]


def test_a_variant_names_the_task_set_and_a_python_of_its_own_needs_no_package():
    arguments = environment_arguments(EnvironmentConfig(name="verifiers/gsm8k", args={"tasks": 10}))
    assert isinstance(arguments, VerifiersConfig)
    assert (arguments.id, arguments.extras()) == ("gsm8k", ["verifiers"])
    assert VerifiersConfig(id="gsm8k", python="/x/bin/python").extras() == []
    with pytest.raises(ValidationError, match="the name of the environment chooses its task set"):
        VerifiersConfig(id="gsm8k", env={"taskset": {"id": "math"}})


def test_an_evaluation_set_changes_only_what_it_names():
    assert merged({"taskset": {"split": "train", "n": 3}, "id": "x"}, {"taskset": {"split": "test"}}) == {
        "taskset": {"split": "test", "n": 3},
        "id": "x",
    }


def test_tasks_are_listed_by_a_process_that_ends(tmp_path):
    assert list_tasks(script(tmp_path), {}, {}) == {"train": ["one", "two"]}


def test_a_python_without_verifiers_is_an_error_that_says_what_to_install():
    with pytest.raises(ValueError, match=r"has no verifiers: .* -m pip install 'verifiers>=0.4,<0.5'"):
        list_tasks(None, {}, {})


@pytest.mark.parametrize(
    ("greeting", "message"),
    [
        ({"version": "0.3.9"}, "has verifiers 0.3.9; tried are 0.4 to below 0.5"),
        ({"version": "0.5.0rc1"}, "has verifiers 0.5.0rc1; tried are 0.4 to below 0.5"),
        ({"error": "ValueError: taskset 'gsm9k' not found"}, "cannot load the environment: .*'gsm9k' not found"),
        (None, "has ended without an answer"),
    ],
)
def test_a_worker_that_cannot_load_the_environment_says_why(tmp_path, greeting, message):
    with pytest.raises(ValueError, match=message):
        list_tasks(script(tmp_path, greeting), {}, {})


def test_a_python_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"environment\.args\.python: .*/nowhere cannot be started"):
        list_tasks(str(tmp_path / "nowhere"), {}, {})


def test_a_worker_has_only_the_variables_that_it_is_given_and_ends_first_when_memory_runs_out(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")

    async def test() -> None:
        worker = VerifiersWorker(script(tmp_path), {}, {"PATH": "/usr/bin:/bin"})
        pid = await asked(worker, "pid")
        assert {*psutil.Process(pid).environ()} - {"LC_CTYPE"} == {"PATH"}
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        await worker.close()

    run(test())


def test_the_death_of_a_worker_loses_its_rollouts_and_no_others(tmp_path):
    async def test() -> None:
        worker = VerifiersWorker(script(tmp_path), {}, {})
        first = await asked(worker, "pid")
        with pytest.raises(WorkerGone, match=r"the process of verifiers ended \(exit code 7\)"):
            await worker.run({"task": "die"})
        second = await asked(worker, "pid")
        await worker.close()
        assert first != second
        assert gone(second)

    run(test())


def test_a_cancelled_rollout_is_cancelled_in_the_worker(tmp_path):
    async def test() -> None:
        worker = VerifiersWorker(script(tmp_path), {}, {})
        await asked(worker, "pid")  # number 1
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.run({"task": "wait"}), 0.05)
        assert await asked(worker, "cancelled") == 2
        await worker.close()

    run(test())


def test_a_worker_that_does_not_give_up_a_cancelled_rollout_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_process, "CANCEL_S", 0.1)

    async def test() -> None:
        worker = VerifiersWorker(script(tmp_path), {}, {})
        stuck = await asked(worker, "pid")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.run({"task": "stick"}), 0.05)
        with pytest.raises(WorkerGone, match="SIGTERM"):
            await worker.run({"task": "pid"})
        assert gone(stuck)
        assert await asked(worker, "pid") != stuck
        await worker.close()

    run(test())
