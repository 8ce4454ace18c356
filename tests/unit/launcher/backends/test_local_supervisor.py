"""The process that supervises a local run, as mrl-submit starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.backends.local import Supervisor, replica_command
from launcher.errors import Failed
from megatron_rl.contract.paths import RunDir


def test_one_that_cannot_be_started_is_an_error_of_one_line(tmp_path):
    with pytest.raises(Failed, match="the supervisor of the run cannot be started"):
        Supervisor([str(tmp_path / "python")])


def test_a_python_of_the_replicas_finds_the_code_of_mrl_and_nothing_else_of_this_one(tmp_path):
    """Not the packages beside it, such as torch, which are of another environment."""
    attempt = RunDir(tmp_path).attempt(1)
    command = replica_command("/usr/bin/env", attempt)
    assert command == ["env", f"PYTHONPATH={attempt.packages}", "/usr/bin/env", "-P", "-m", "megatron_rl.replica_main"]
    program = (
        "import megatron_rl.contract.paths, importlib.util as u; print(u.find_spec('torch'), u.find_spec('launcher'))"
    )
    other = [sys.executable, "-S", "-P", "-c", program]  # a Python without site-packages
    ran = subprocess.run([*command[:2], *other], capture_output=True, text=True, check=True)
    assert ran.stdout == "None None\n"


def test_this_python_needs_no_links(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    assert replica_command(sys.executable, attempt)[0] == sys.executable
    assert not attempt.packages.exists()
