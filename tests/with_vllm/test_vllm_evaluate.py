"""An evaluation whose answers come from vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hf_helpers import publish
from vllm_front import PYTHON_VARIABLE, START_S
from vllm_training import SERVED

from megatron_rl.generate.vllm.start import version_in

MRL = Path(sys.executable).with_name("mrl")


def test_published_weights_are_evaluated_with_vllm(tmp_path: Path) -> None:
    published, python = tmp_path / "published", os.environ[PYTHON_VARIABLE]
    publish(published, SERVED["Qwen2"])
    options = ["--env=arithmetic", "--engine=vllm", "--k=2", "--prompts=3", "--max-new-tokens=4", "--json"]
    done = subprocess.run(
        [MRL, "evaluate", str(published), *options, "--vllm-python", python],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "] starting vLLM for " in done.stderr
    result = json.loads(done.stdout)
    assert result["settings"]["engine"].startswith(f"vllm {version_in(python, os.environ)}")
    assert [(found["problems"], found["answers"]) for found in result["sets"].values()] == [(3, 6), (3, 6)], result
