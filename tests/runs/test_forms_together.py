"""Forms that a program forces, beside adapters, replayed experts and common beginnings: on policy the ratio is 1."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from loop_helpers import lines_of
from optional import needs
from server_helpers import byte_tokenizer

from megatron_rl.contract.paths import RunDir

pytestmark = needs("llguidance")

STEPS, ANSWERS = 3, 6
LIMIT_S = 1500.0
PROGRAM = """
import json, os, sys, urllib.request

FORM = {"type": "object", "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["number"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "take", "parameters": FORM}}]

def ask(messages, **form):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **form}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]

problem = json.loads(sys.stdin.readline())
said = [{"role": "user", "content": problem["prompt"]}]
schema = {"type": "json_schema", "json_schema": {"name": "guess", "schema": FORM}}
first = ask(said, response_format=schema)
said += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": "again"}]
calls = [ask(said, tools=TOOLS, tool_choice="required")["tool_calls"][0]["function"] for _ in range(2)]
numbers = [json.loads(text)["number"] for text in (first["content"], *(call["arguments"] for call in calls))]
print(json.dumps({"reward": sum(numbers) / 27, "first": numbers[0]}))
"""
MODEL = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "max_position_embeddings": 1024,
    "tied_embeddings": False,
    "dtype": "fp32",
    "init": "from-scratch",
}
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize(
    ("model", "sections"),
    [
        pytest.param({"lora": {"rank": 4}}, {}, id="adapters"),
        pytest.param({**EXPERTS, "router_replay": "rollout"}, {}, id="experts as the engine chose them"),
        pytest.param({**EXPERTS, "router_replay": "old"}, {"grpo": {"iterations": 2}}, id="experts of the first pass"),
        pytest.param({}, {"placement": {"training": {"tp": 2}}, "job": {"gpus_per_node": 2}}, id="TP 2"),
        pytest.param({}, {"placement": {"training": {"cp": 2}}, "job": {"gpus_per_node": 2}}, id="CP 2"),
    ],
)
def test_answers_in_forms_that_share_their_beginning_have_the_ratio_one(
    tmp_path: Path, model: dict[str, Any], sections: dict[str, Any]
) -> None:
    """Six rollouts share a prompt, and two answers of each a first turn: the trainer packs them as a tree."""
    byte_tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(9)))
    args = {"command": ["python3", "program.py"], "code": ["program.py"], "problems": "problems.jsonl"}
    recipe: dict[str, Any] = {
        "name": "forms",
        "model": MODEL | model,
        "tokenizer": {"type": "huggingface", "path": str(tmp_path / "tokenizer")},
        "environment": {"name": "program", "args": args},
        "sampling": {"max_new_tokens": 120},
        "grpo": {"prompts_per_step": 1, "group_size": ANSWERS},
        "optimizer": {"learning_rate": 0.01},
        "training": {"steps": STEPS, "sequence_length": 1024, "tokens_per_microbatch": 8192},
        "evaluation": {"every": 0},
        "job": {"nodes": 1, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1},
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    (tmp_path / "forms.yaml").write_text(yaml.safe_dump(recipe))
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
    assert trained
    assert max(line["inference_logprob_difference_max"] for line in trained) < 1e-4
    if recipe["grpo"].get("iterations", 1) == 1:
        assert [line["importance_ratio"] for line in trained] == pytest.approx([1.0] * len(trained), abs=1e-4)
