"""A whole run whose rollouts are programs: interrupted in one of them, it draws the same curve as undisturbed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from exactly_once import fates
from loop_helpers import Attempt, loop_recipe, outcome_of, prepare, reproducible
from optional import needs

from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.codes import DRAINED, EXIT_DRAINED, PREEMPTED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write

pytestmark = needs("datasets")

AGENT = """
import json, os, sys, time
from pathlib import Path
from urllib.request import Request, urlopen

folder, problem = Path(sys.argv[1]), json.load(sys.stdin)

def ask(prompt):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "prompt": prompt}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    with urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["text"]

first = ask(problem["prompt"])
if (folder / "hang").exists() and problem["prompt"] == "7+1=":
    (folder / f"hanging.{os.getpid()}").touch()
    time.sleep(600)
second = ask(problem["prompt"] + first + "+1=")
print(sum(character.isdigit() for character in first + second))
"""


def recipe(folder: Path) -> dict[str, Any]:
    (folder / "agent.py").write_text(AGENT)
    problems = [{"prompt": f"{number}+1="} for number in range(10)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    arguments = {
        "command": ["{python}", "agent.py", str(folder)],
        "code": [str(folder / "agent.py")],
        "problems": str(folder / "problems.jsonl"),
    }
    values = loop_recipe(
        job={"gpus_per_node": 1}, training={"steps": 4}, evaluation={"every": 0}, save={"every": 2},
        environment={"name": "program", "args": arguments}, grpo={"group_size": 2, "prompts_per_step": 3},
    )  # fmt: skip
    values["model"] |= {"init": "from-scratch", "max_position_embeddings": 32}
    return values


def finished(run_dir: RunDir, cache: Path) -> RunDir:
    attempt = Attempt(run_dir, cache, ranks=1)
    assert attempt.exit_codes() == [0], attempt.logs()
    return run_dir


@pytest.mark.slow  # a minute
def test_a_run_drained_in_the_middle_of_a_program_ends_it_and_begins_its_rollout_again(tmp_path: Path) -> None:
    values = recipe(tmp_path)
    undisturbed = finished(prepare(tmp_path / "undisturbed", values), tmp_path / "cache")
    assert {line["turns_mean"] for line in reproducible(undisturbed)[0]} == {2.0}

    (tmp_path / "hang").touch()
    run_dir = prepare(tmp_path / "drained", values)
    first = Attempt(run_dir, tmp_path / "cache", ranks=1)
    hanging = wait_for_programs(tmp_path, first)
    now = time.time()
    write(first.files.drain, Drain(PREEMPTED, "test", now, now + 60))
    first.processes[0].terminate()
    assert first.exit_codes(30) == [EXIT_DRAINED], first.logs()
    outcome = outcome_of(first.files)
    assert outcome is not None and outcome.outcome == DRAINED
    assert not [pid for pid in hanging if alive(pid)]

    (tmp_path / "hang").unlink()
    assert reproducible(finished(run_dir, tmp_path / "cache")) == reproducible(undisturbed)
    assert {*fates(run_dir).values()} == {1, 2, 3, 4}


def wait_for_programs(folder: Path, attempt: Attempt) -> list[int]:
    """Wait until both rollouts of a group hang, and return the process ids of their programs."""
    deadline = time.monotonic() + 90
    while len(found := [*folder.glob("hanging.*")]) < 2:
        assert attempt.processes[0].is_alive() and time.monotonic() < deadline, attempt.logs()
        time.sleep(0.02)
    return [int(file.suffix[1:]) for file in found]


def alive(pid: int) -> bool:
    """Whether a process still runs a few seconds later: programs end beside the rank."""
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return False
    except psutil.TimeoutExpired:
        return True
    return False
