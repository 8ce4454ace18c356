"""What the tests of the numerical core share: a tiny policy, trajectories that look sampled, and the same model in
`transformers`, whose forward is the independent witness."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.inference.api import Completion
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.config import ModelConfig, Recompute
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.platform.api import Platform
from megatron_rl.platform.attention import whole_sequences
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rollout.driver import RolloutBatch
from megatron_rl.run import Run, set_up

CPU = torch.device("cpu")
ALPHABET = "0123456789+-="
VOCAB = len(ALPHABET) + 2  # end-of-text and padding
END = len(ALPHABET)
PADDED_VOCAB = 16


def tiny_model(**fields: Any) -> ModelConfig:
    return ModelConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "max_position_embeddings": 48,
            "vocab_multiple": PADDED_VOCAB,
            "rope_base": 10000.0,
            "layernorm_epsilon": 1e-6,
            "tied_embeddings": True,
            "dtype": "fp32",
            "init": "from-scratch",
            **fields,
        }
    )


def tiny_run(**sections: dict[str, Any]) -> RunConfig:
    """A recipe for one rank; `sections` are laid over its sections."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "job": {"nodes": 1, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1},
        "model": tiny_model().model_dump(),
        "tokenizer": {"type": "characters", "alphabet": ALPHABET},
        "environment": {"name": "arithmetic", "args": {"evaluation_problems": 8}},
        "sampling": {"max_new_tokens": 3},
        "grpo": {"prompts_per_step": 4, "group_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 4},
    }
    for name, fields in sections.items():
        recipe[name] = recipe.get(name, {}) | fields
    return RunConfig.model_validate(recipe)


def tiny_policy(
    platform: Platform, model: ModelConfig | None = None, scale: float = 0.3, recompute: Recompute = "none"
) -> Policy:
    """Random weights, the biases and norms included; `scale` makes its distributions far from uniform."""
    platform.seed(5)
    policy = build_policy(model or tiny_model(), VOCAB, platform, recompute)
    stir(policy, scale)
    return policy


def quiet_safe_points() -> SafePoints:
    """Of a rank that nobody asks to leave and whose files nobody reads."""
    attempt = RunDir("/nonexistent").attempt(1)
    return SafePoints(Activity(attempt, published=False), DrainListener(attempt), Timeline())


_FOLDERS = tempfile.TemporaryDirectory(prefix="mrl-runs-")
"""Of runs whose files nobody reads."""


def build_run(config: RunConfig, platform: Platform, groups: Any, scale: float = 0.3) -> Run:
    """A run whose policy, and with a KL penalty its reference, have distributions far from uniform."""
    run_dir = RunDir(tempfile.mkdtemp(dir=_FOLDERS.name))
    run = set_up(run_dir, run_dir.attempt(1), config, platform, groups, quiet_safe_points())
    stir(run.trainer.policy, scale)
    run.trainer.optimizer.reload()
    run.trainer.optimizer.megatron.reload_model_params()
    run.trainer.optimizer.offload()
    if run.trainer.reference is not None:
        stir(run.trainer.reference, scale, seed=12)
    return run


@torch.no_grad()
def stir(policy: Policy, scale: float, seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in policy.parameters():
        weight += (scale * torch.randn(weight.shape, generator=generator)).to(weight)


@torch.no_grad()
def full_forward(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] logits of one sequence on its own, no cache and nothing shared."""
    layout = policy.layout(whole_sequences([len(tokens)]))
    return policy(torch.tensor(tokens), torch.arange(len(tokens)), layout)


def answer_logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[answer] log-probs of the answer's tokens, by a full forward."""
    logits = full_forward(policy, [*prompt, *answer])[len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)


# Trajectories


def trajectory(prompt: list[int], answer: list[int], reward: float = 0.0, text: str = "", **fields: Any) -> Trajectory:
    """One answer; `fields` are of its completion, of which one policy version may stand for all."""
    versions = [fields.pop("policy_version", 0)] * len(answer)
    defaults = {"logprobs": [-1.0] * len(answer), "finish_reason": "stop", "versions": versions}
    return Trajectory.single(prompt, Completion(tokens=answer, **(defaults | fields)), text, reward)


def prompt_of(one: Trajectory) -> list[int]:
    return one.tokens[: one.prompt_length]


def answer_of(one: Trajectory) -> list[int]:
    return one.tokens[one.prompt_length :]


def packed(
    trajectories: Sequence[Trajectory], chosen: Sequence[int] | None = None, limit: int = 10**9
) -> list[MicroBatch]:
    """The chosen trajectories, or all, in micro-batches."""
    tokens, masks = [each.tokens for each in trajectories], [each.loss_mask for each in trajectories]
    return pack(tokens, masks, range(len(trajectories)) if chosen is None else chosen, limit)


def random_groups(groups: int, group_size: int, seed: int = 0, longest: int = 7) -> list[TrajectoryGroup]:
    """Groups of prompts and answers of mixed lengths, with rewards that mostly differ."""
    draw = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(draw.randint(low, high))]

    def answer(prompt: list[int]) -> Trajectory:
        answer = tokens(1, longest)
        cut = len(answer) == longest
        logprobs = [-draw.uniform(0.1, 4.0) for _ in answer]
        return trajectory(
            prompt, answer, draw.choice([0.0, 0.5, 1.0]), logprobs=logprobs, finish_reason="length" if cut else "stop"
        )

    made = []
    for ordinal in range(groups):
        prompt = tokens(1, 9)
        made.append(TrajectoryGroup(ordinal, Problem("", {}), [answer(prompt) for _ in range(group_size)], {}))
    return made


def batch_of(groups: list[TrajectoryGroup], first: int, last: int) -> RolloutBatch:
    """The share [first, last) of a recorded batch."""
    failures: Counter[str] = Counter()
    for group in groups[first:last]:
        failures.update(group.failures)
    return RolloutBatch(groups[first:last], list(range(first, last)), 0, len(groups), failures=failures)


# The same model in transformers


def witness(policy: Policy, model: ModelConfig) -> PreTrainedModel:
    """The model of `transformers` that has this shape, with the policy's weights: Qwen3, with experts or without, where
    queries and keys are normed, Llama where there are no biases, else Qwen2."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_base}
    if model.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **model.rope_scaling.model_dump()}
    if model.num_experts is not None:
        architecture, extra = (
            (Qwen3MoeConfig, Qwen3MoeForCausalLM),
            {
                "head_dim": model.head_size,
                "num_experts": model.num_experts,
                "num_experts_per_tok": model.experts_per_token,
                "moe_intermediate_size": model.expert_ffn_hidden_size,
                "norm_topk_prob": True,
            },
        )
    elif model.qk_norm:
        architecture, extra = (Qwen3Config, Qwen3ForCausalLM), {"head_dim": model.head_size}
    elif not model.qkv_bias:
        architecture, extra = (LlamaConfig, LlamaForCausalLM), {"head_dim": model.head_size}
    else:
        architecture, extra = (Qwen2Config, Qwen2ForCausalLM), {}
    make_config, make = architecture
    config = make_config(
        vocab_size=PADDED_VOCAB,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.layernorm_epsilon,
        rope_parameters=rope,
        tie_word_embeddings=model.tied_embeddings,
        attn_implementation="eager",
        **extra,
    )
    twin = make(config).float()
    theirs = dict(twin.named_parameters())
    ours = in_their_names(policy, model, lambda weight: weight.detach().float())
    assert theirs.keys() == ours.keys()
    with torch.no_grad():
        for name, weight in theirs.items():
            weight.copy_(ours[name])
    return twin


def in_their_names(policy: Policy, model: ModelConfig, of: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """`of(parameter)`, which may be the weight or its gradient, under the names and shapes of `transformers`."""
    ours = {name: of(weight) for name, weight in policy.named_parameters()}
    head = model.head_size
    per_group = model.num_attention_heads // model.num_query_groups
    theirs = {
        "model.embed_tokens.weight": ours["embedding.word_embeddings.weight"],
        "model.norm.weight": ours["decoder.final_layernorm.weight"],
    }
    if not model.tied_embeddings:
        theirs["lm_head.weight"] = ours["output_layer.weight"]
    for i in range(model.num_layers):
        layer, their_layer = f"decoder.layers.{i}", f"model.layers.{i}"
        theirs[f"{their_layer}.input_layernorm.weight"] = ours[f"{layer}.input_layernorm.weight"]
        theirs[f"{their_layer}.post_attention_layernorm.weight"] = ours[f"{layer}.pre_mlp_layernorm.weight"]
        theirs[f"{their_layer}.self_attn.o_proj.weight"] = ours[f"{layer}.self_attention.linear_proj.weight"]
        if model.num_experts is not None:
            experts = [f"{layer}.mlp.experts.local_experts.{number}" for number in range(model.num_experts)]
            theirs[f"{their_layer}.mlp.gate.weight"] = ours[f"{layer}.mlp.router.weight"]
            for name, linear in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
                stacked = torch.stack([ours[f"{expert}.{linear}.weight"] for expert in experts])
                theirs[f"{their_layer}.mlp.experts.{name}"] = stacked
        else:
            theirs[f"{their_layer}.mlp.down_proj.weight"] = ours[f"{layer}.mlp.linear_fc2.weight"]
            gate, up = ours[f"{layer}.mlp.linear_fc1.weight"].chunk(2)
            theirs[f"{their_layer}.mlp.gate_proj.weight"], theirs[f"{their_layer}.mlp.up_proj.weight"] = gate, up
        # megatron-core keeps each group's query heads, key and value together.
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            qkv = ours[f"{layer}.self_attention.linear_qkv.{kind}"]
            grouped = qkv.view(model.num_query_groups, (per_group + 2) * head, -1)
            q, k, v = (part.reshape(-1, *qkv.shape[1:]) for part in grouped.split([per_group * head, head, head], 1))
            theirs[f"{their_layer}.self_attn.q_proj.{kind}"] = q
            theirs[f"{their_layer}.self_attn.k_proj.{kind}"] = k
            theirs[f"{their_layer}.self_attn.v_proj.{kind}"] = v
        if model.qk_norm:
            theirs[f"{their_layer}.self_attn.q_norm.weight"] = ours[f"{layer}.self_attention.q_layernorm.weight"]
            theirs[f"{their_layer}.self_attn.k_norm.weight"] = ours[f"{layer}.self_attention.k_layernorm.weight"]
    return theirs
