"""Frameworks that force a form of the answer are trained: pydantic-ai, LangChain and the OpenAI Agents SDK."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from commands import Command
from loop_helpers import lines_of
from optional import needs
from server_helpers import byte_tokenizer
from vllm_front import PYTHON_VARIABLE

from megatron_rl.contract.paths import RunDir

pytestmark = needs("llguidance", "openai")

FORMS = Path(__file__).parents[2] / "examples" / "programs" / "forms"
STEPS, ANSWERS = 10, 8
LIMIT_S = 1500.0
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 1280,
    "tied_embeddings": True,
    "dtype": "fp32",
    "init": "from-scratch",
}
LARGER = {"hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 2}
"""Sizes whose heads vLLM computes on a CPU."""
IN_VLLM = pytest.param(
    "vllm", marks=pytest.mark.skipif(not os.environ.get(PYTHON_VARIABLE), reason=f"no {PYTHON_VARIABLE}")
)


def recipe(folder: Path, program: str, python: str, vllm: str | None) -> dict[str, Any]:
    """vllm: Python with the vLLM that answers; None: the own engine does."""
    byte_tokenizer().save(folder / "tokenizer")
    (folder / "problems.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}", "answer": 9}) + "\n" for n in range(20))
    )
    args = {"command": [python, program], "code": [str(FORMS / program)], "problems": "problems.jsonl", "held_out": 0.1}
    return {
        "name": "forms",
        "model": MODEL if vllm is None else MODEL | LARGER,
        "tokenizer": {"type": "huggingface", "path": str(folder / "tokenizer")},
        "environment": {"name": "program", "args": args},
        "sampling": {"max_new_tokens": 120},
        "grpo": {"prompts_per_step": 1, "group_size": ANSWERS},
        "optimizer": {"learning_rate": 0.02},
        "training": {"steps": STEPS, "sequence_length": 1280},
        "job": {
            "nodes": 1 if vllm is None else 2,
            "gpus_per_node": 1,
            "device": "cpu",
            "threads_per_rank": 1,
            "silence_limit_s": int(LIMIT_S),
        },
    } | ({} if vllm is None else in_vllm(vllm))


def in_vllm(python: str) -> dict[str, Any]:
    return {
        "inference": {"engine": "vllm", "max_batch": 8, "vllm": {"python": python, "forms": True}},
        "placement": {"mode": "partitioned", "inference": {"nodes": 1}},
    }


@pytest.mark.parametrize("engine", ["own", IN_VLLM])
@pytest.mark.parametrize("program", ["pydantic_ai_form.py", "langchain_form.py", "agents_form.py"])
def test_a_framework_that_forces_forms_is_trained(
    clients_python: str, tmp_path: Path, program: str, engine: str
) -> None:
    """A model with random weights, which alone would write no JSON, learns the digit that is rewarded most."""
    vllm = os.environ[PYTHON_VARIABLE] if engine == "vllm" else None
    (tmp_path / "forms.yaml").write_text(yaml.safe_dump(recipe(tmp_path, program, clients_python, vllm)))
    run = RunDir(tmp_path / "run")
    command = Command(
        ["mrl-submit", "forms.yaml", "--run-dir", str(run.root)],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )
    output, _ = command.communicate(timeout=LIMIT_S)
    assert command.returncode == 0, output
    lines = lines_of(run.metrics)
    assert [line["answers"] for line in lines] == [ANSWERS] * STEPS
    trained = [line for line in lines if line["nonzero_groups_ratio"] > 0]
    assert len(trained) >= STEPS / 3
    assert all(line["importance_ratio"] == 1.0 for line in trained)
    assert max(line["inference_logprob_difference_max"] for line in trained) < (1e-5 if vllm is None else 1e-3)
    rewards = [line["mean_reward"] for line in lines]
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.1, rewards
