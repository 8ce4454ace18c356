"""Completion in a real bash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
eval "$(mrl completion bash)"
compopt() { local IFS=' '; echo "compopt $*"; }
COMP_LINE=$1 COMP_POINT=${#1}
$(complete -p "${1%% *}" | sed 's/.*-F \\([^ ]*\\) .*/\\1/') "${1%% *}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str) -> list[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "--norc", "-c", SCRIPT, "bash", line], capture_output=True, text=True, env={**os.environ, "PATH": path}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_gets_values_behind_a_key_and_keys_for_help():
    assert completed("mrl-submit demo grpo.policy_loss=g") == ["gspo", "gspo_token"]
    assert completed("mrl-submit demo grpo.policy_l") == ["compopt -o nospace", "grpo.policy_loss="]
    assert completed("mrl help grpo.policy_l") == ["grpo.policy_loss"]
