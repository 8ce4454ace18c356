"""All processes of a child are found and ended, also those that hide the mark in their environment."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from megatron_rl.rank.marked_processes import MarkedProcesses

PARENT = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"], env={})
print(child.pid, flush=True)
sys.stdin.read()
"""


def test_a_process_without_the_mark_is_ended_after_its_parent() -> None:
    marked = MarkedProcesses()
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, **marked.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        assert {process.pid for process in marked.living()} == {parent.pid, child.pid}
        parent.kill()
        parent.wait()
        assert marked.living() == [child], "this process has adopted it"
        marked.kill()
        child.wait(60)
        assert marked.living() == []


def test_other_children_are_left_alone() -> None:
    marked = MarkedProcesses()
    with subprocess.Popen(["sleep", "60"]) as other:
        assert marked.living() == []
        marked.kill()
        assert other.poll() is None
        other.kill()
