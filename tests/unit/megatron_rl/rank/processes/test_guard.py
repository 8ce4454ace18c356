"""A guarded command ends with all that it has started, and its guard says how it ended."""

from __future__ import annotations

import os
import subprocess

import psutil
import pytest

from megatron_rl.rank.processes.guard import END, code_of, guarded

LIMIT_S = 60.0
STARTS_ANOTHER = "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True).pid, flush=True)"
ENDS_ITSELF = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(5))"


def start(*lines: str, grace_s: float = 0.0) -> subprocess.Popen[str]:
    command = guarded(["python3", "-c", "\n".join(lines)], grace_s)
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("end", "code"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 11)", -11)], ids=["exit", "signal"]
)
def test_what_a_command_leaves_behind_ends_before_its_guard(end: str, code: int) -> None:
    with start(STARTS_ANOTHER, end) as guard:
        assert guard.stdout is not None
        other = int(guard.stdout.readline())
        assert code_of(guard.wait(LIMIT_S)) == code
        assert has_ended(other)


@pytest.mark.parametrize(("grace_s", "code"), [(LIMIT_S, 5), (0.0, -9)], ids=["with grace", "without grace"])
def test_a_guard_that_is_ordered_to_ends_everything(grace_s: float, code: int) -> None:
    with start(ENDS_ITSELF, STARTS_ANOTHER, "signal.pause()", grace_s=grace_s) as guard:
        assert guard.stdout is not None
        other = int(guard.stdout.readline())
        os.kill(guard.pid, END)
        assert code_of(guard.wait(LIMIT_S)) == code
        assert has_ended(other)


def test_a_command_that_cannot_be_started_is_named() -> None:
    done = subprocess.run(guarded(["/nowhere/python"]), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 127
    assert done.stderr == "/nowhere/python cannot be started: No such file or directory\n"
