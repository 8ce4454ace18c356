"""vLLM drafts with the prediction layer of an export, and accepts its drafts once the layer is trained."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import torch
import yaml
from checkpoint_helpers import checkpointer, outcome
from core_helpers import tiny_run
from hf_helpers import VOCAB, model_of
from published_ahead import of_deepseek, publish_ahead
from vllm_front import PYTHON_VARIABLE, START_S
from vllm_training import SERVED

from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.packing import pack
from megatron_rl.checkpoint.hf.to_hf import to_hugging_face
from megatron_rl.checkpoint.initial_weights import load_pretrained
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training.ahead import loss_ahead
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.sharded_names import PREDICTION
from megatron_rl.model.trainable import Trainable
from megatron_rl.rank.metrics.stats import LossStats, uncounted

GLM = SERVED["GLM-4.5"]
TOKENS = range(3, 60)
DRAFTED = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    llm = LLM(
        folder, dtype="float32", enforce_eager=True, max_model_len=64, skip_tokenizer_init=True,
        disable_log_stats=False, speculative_config=drafts,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy)
    names = ("num_draft_tokens", "num_accepted_tokens")
    found = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    print("drafted", json.dumps([found[f"vllm:spec_decode_{name}"] for name in names]))
"""


def test_more_drafts_are_accepted_of_a_trained_layer(tmp_path: Path, platform: Any, groups: Any) -> None:
    published = tmp_path / "published"
    publish_ahead(published, GLM, of_deepseek(GLM["num_hidden_layers"]), torch.float32)
    model = model_of(published, prediction_loss_coefficient=0.3)
    policy = build_policy(model, VOCAB, platform)
    load_pretrained(policy, model, published)
    Trainable.of(model).mark(policy)
    first = {name: weight.detach().clone() for name, weight in policy.named_parameters() if name.startswith(PREDICTION)}
    cycle = [*TOKENS]
    random.Random(0).shuffle(cycle)
    learn(policy, cycle)

    recipe = tiny_run(model=model.model_dump()).model_dump()
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    run.resolved.write_text(yaml.safe_dump(recipe | {"tokenizer": {"type": "huggingface", "path": str(published)}}))
    prompts = [along(cycle, start, 4) for start in range(0, 48, 4)]
    accepted = []
    for step, replaced in enumerate(({}, first), 1):
        policy.load_state_dict(replaced, strict=False)
        saving = checkpointer(run.root)
        saving.save(step, {"model": policy.sharded_state_dict()}, {})
        outcome(saving)
        to_hugging_face(run.checkpoint(step), tmp_path / str(step), platform)
        drafted, right = drafts_of(tmp_path / str(step), prompts)
        accepted.append(right / drafted)
    assert accepted[0] > 0.9 > 0.2 > accepted[1], accepted


def along(cycle: list[int], start: int, length: int) -> list[int]:
    return [cycle[(start + step) % len(cycle)] for step in range(length)]


def learn(policy: Policy, cycle: list[int]) -> None:
    """Teach policy and prediction layer to go along the cycle."""
    draw = random.Random(1)
    adam = torch.optim.AdamW([weight for weight in policy.parameters() if weight.requires_grad], lr=3e-3)
    for _ in range(100):
        rows = [along(cycle, draw.randrange(len(cycle)), 31) for _ in range(16)]
        masks = [[number > 0 for number in range(31)] for _ in rows]
        weight = torch.full((16 * 30,), 1 / (16 * 30))

        def loss(hidden: torch.Tensor, read: ModelInput) -> torch.Tensor:
            return -predicted_logprobs(hidden, policy.output(), read.targets, 1.0, entropy="none")[0].mean()

        adam.zero_grad()
        forward_backward(
            policy,
            [ModelInput.of(policy, batch) for batch in pack(rows, masks, range(16), 10**9)],
            loss,
            Pipeline(),
            stop=lambda: False,
            loss_ahead=loss_ahead(policy, weight.__getitem__, [uncounted(LossStats)]),
        )
        adam.step()


def drafts_of(folder: Path, prompts: list[list[int]]) -> tuple[int, int]:
    """Tokens that a vLLM of these weights drafted, and those of them that it accepted."""
    script = folder / "drafted.py"
    script.write_text(DRAFTED)
    room = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [os.environ[PYTHON_VARIABLE], str(script), str(folder), json.dumps(prompts)],
        env={**os.environ, **room},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=2 * START_S,
        check=False,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("drafted ")]
    assert found, done.stderr[-3000:]
    drafted, right = json.loads(found[0].removeprefix("drafted "))
    return drafted, right
