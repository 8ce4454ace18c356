"""GPU and CPU compute the same from the same weights; transformers' model on the CPU is the reference."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import END, VOCAB, packed, tiny_policy, tiny_run, trajectory
from family_shapes import DEEPSEEK
from gpu_helpers import DEVICE, NEEDS_GPU, gpu_model, metrics, run_recipe
from published_twin import published, published_twin

from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward_backward
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytest.importorskip("transformers")
pytestmark = NEEDS_GPU

LATENT = DEEPSEEK | {
    "latent_attention": {
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    # Every token has all experts, so that rounding to bf16 changes no choice.
    "experts_per_token": DEEPSEEK["num_experts"],
    "router": DEEPSEEK["router"] | {"groups_per_token": DEEPSEEK["router"]["groups"]},
}
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [8, 9], [3] * 30]
BF16 = 5e-2
"""Tolerance of a logit: in bf16, 8 bits over sums of four layers; in fp32, 1e-4 for the order of summation."""


@pytest.mark.parametrize(("dtype", "off"), [("fp32", 1e-4), ("bf16", BF16)])
@pytest.mark.parametrize(
    "fields", [{}, {"qk_norm": True, "qkv_bias": False}, LATENT], ids=["qwen2.5", "qwen3", "deepseek_v3"]
)
def test_logits_are_the_references(platform: Any, groups: Any, dtype: str, off: float, fields: dict[str, Any]) -> None:
    model = gpu_model(dtype=dtype, **fields)
    policy = tiny_policy(platform, model, scale=0.1)
    twin = published_twin(policy, model).eval()
    tokens = torch.tensor([token for sequence in SEQUENCES for token in sequence], device=platform.device)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in SEQUENCES]).to(platform.device)
    with torch.no_grad():
        logits = policy(tokens, positions, policy.layout(whole_sequences([len(sequence) for sequence in SEQUENCES])))
        expected = torch.cat([twin(torch.tensor([sequence])).logits[0, :, :VOCAB] for sequence in SEQUENCES])
    torch.testing.assert_close(logits.cpu().float(), expected, rtol=off, atol=off)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_are_the_references_if_answers_share_their_prompt(platform: Any, groups: Any, recompute: Any) -> None:
    model = gpu_model()
    policy = tiny_policy(platform, model, recompute=recompute)
    twin = published_twin(policy, model)
    prompt, answers = [1, 2, 3, 4, 5], [[6, 7, END], [6, 8, 9, END], [10]]
    inputs = [ModelInput.of(policy, micro) for micro in packed([trajectory(prompt, answer) for answer in answers])]

    def loss(hidden: torch.Tensor, micro: Any) -> torch.Tensor:
        logprobs, _ = predicted_logprobs(hidden, policy.output(), micro.targets, temperature=1.0)
        return -logprobs.sum()

    forward_backward(policy, inputs, loss, Pipeline(), stop=lambda: False)
    for answer in answers:
        logits = twin(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1, :VOCAB]
        torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum").backward()
    theirs = {name: weight.grad for name, weight in twin.named_parameters()}
    ours = published(policy, model, lambda weight: torch.zeros(0) if weight.grad is None else weight.grad.cpu())
    for name, gradient in ours.items():
        expected = theirs[name]
        assert expected is not None
        torch.testing.assert_close(
            gradient, expected, rtol=1e-3, atol=1e-4, msg=lambda said, name=name: f"{name}: {said}"
        )


def test_greedy_tokens_are_the_references_likeliest(platform: Any, groups: Any) -> None:
    model = gpu_model()
    policy = tiny_policy(platform, model).requires_grad_(False).eval()
    twin = published_twin(policy, model).eval()
    engine = Engine(policy, model, InferenceConfig(max_batch=2), {END})
    greedy = Sampling(temperature=0.0, max_new_tokens=12)
    requests = [engine.submit(GenerationRequest(sequence, 1, greedy, key=0)) for sequence in SEQUENCES]
    while engine.busy:
        engine.step()
    for request, sequence in zip(requests, SEQUENCES, strict=True):
        completions = engine.take(request)
        assert completions is not None
        (completion,) = completions
        whole = torch.tensor([[*sequence, *completion.tokens]])
        with torch.no_grad():
            logprobs = torch.log_softmax(twin(whole).logits[0, len(sequence) - 1 : -1, :VOCAB], dim=-1)
        assert logprobs.argmax(-1).tolist() == completion.tokens
        found = torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, logprobs.amax(-1), rtol=1e-3, atol=1e-3)


def test_a_checkpoint_of_a_cpu_resumes_alike_on_both(tmp_path: Path) -> None:
    """The same answers to the same prompts with the same random numbers, and an equal gradient."""
    taught = gpu_model().model_dump() | {
        "init": "supervised",
        "supervised": {"steps": 40, "batch_size": 16, "learning_rate": 3e-3},
    }
    recipe = tiny_run(model=taught, grpo={"prompts_per_step": 8}, save={"every": 1}).model_dump()
    ours, theirs = RunDir(tmp_path / "ours"), RunDir(tmp_path / "theirs")
    run_recipe(ours, recipe, 1, "cpu")
    shutil.copytree(ours.root, theirs.root, symlinks=True)
    recipe["training"]["steps"] += 1
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(run_recipe, run, recipe, 2, device) for run, device in ((ours, DEVICE), (theirs, "cpu"))]
    for end in ends:
        end.result()
    our, their = (metrics(run)[-1] for run in (ours, theirs))
    assert our["step"] == their["step"] == recipe["training"]["steps"]
    assert (our["mean_reward"], our["answer_length"]) == (their["mean_reward"], their["answer_length"])
    assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-3)
    assert our["entropy"] == pytest.approx(their["entropy"], rel=1e-4)
