"""Helpers for tests of the numerical core: a tiny policy, and trajectories that look sampled."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

import megatron_rl.model.platform.megatron_core  # noqa: F401  before megatron-core itself, as in a rank
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import Completion
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.cpu import CpuKernels
from megatron_rl.model.platform.device import Device
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.router_replay import RecordedChoices
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import ModelConfig, Recompute
from megatron_rl.run.setup import set_up
from megatron_rl.run.state import Run

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
    """Recipe for one rank; `sections` override keys of its sections."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "job": {"nodes": 1, "gpus_per_node": 1, "device": "cpu", "threads_per_rank": 1},
        "model": tiny_model().model_dump(),
        "tokenizer": {"type": "characters", "alphabet": ALPHABET},
        "environment": {"name": "arithmetic", "args": {"draws": 1500, "evaluation_problems": 8}},
        "sampling": {"max_new_tokens": 3},
        "grpo": {"prompts_per_step": 4, "group_size": 4},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 4},
    }
    for name, fields in sections.items():
        recipe[name] = recipe.get(name, {}) | fields
    return RunConfig.model_validate(recipe)


def tiny_policy(
    platform: Device, model: ModelConfig | None = None, scale: float = 0.3, recompute: Recompute = "none"
) -> Policy:
    """Build a policy with random weights, biases and norms; `scale` makes its distributions far from uniform."""
    platform.seed(5)
    policy = build_policy(model or tiny_model(), VOCAB, platform, recompute)
    stir(policy, scale)
    return policy


def grouped_products() -> AbstractContextManager[Any]:
    """Make a CPU multiply all experts of a layer at once within a `with` block, as GPUs do."""
    return mock.patch.object(CpuKernels, "against_grouped_products", lambda *_: None)


def quiet_safe_points() -> SafePoints:
    """Safe points of a rank that is never asked to leave and writes no files."""
    attempt = RunDir("/nonexistent").attempt(1)
    return SafePoints(Activity(attempt, published=False), DrainListener(attempt), Timeline())


def here_of(platform: Any, groups: Any, safe_points: SafePoints | None = None) -> Here:
    """Surroundings of a rank that writes no files and, by default, is never asked to leave."""
    run = RunDir("/nonexistent")
    return Here(run, run.attempt(1), platform, groups, safe_points or quiet_safe_points())


@cache
def _folders() -> tempfile.TemporaryDirectory[str]:
    """Folder for runs whose files no test reads. Created only on use: ranks would not delete theirs."""
    return tempfile.TemporaryDirectory(prefix="mrl-runs-")


def build_run(config: RunConfig, platform: Device, groups: Any, scale: float = 0.3) -> Run:
    """Set up a run whose policy and reference, if any, have distributions far from uniform."""
    run_dir = RunDir(tempfile.mkdtemp(dir=_folders().name))
    run = set_up(config, Here(run_dir, run_dir.attempt(1), platform, groups, quiet_safe_points()))
    stir(run.trainer.policy, scale)
    run.trainer.optimizer.reload()
    run.trainer.optimizer.megatron.reload_model_params()
    run.trainer.optimizer.offload()
    if run.models.reference is not None:
        stir(run.models.reference, scale, seed=12)
    return run


@torch.no_grad()
def stir(policy: Policy, scale: float, seed: int = 11) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy.named_parameters():
        weight += (scale * torch.randn(weight.shape, generator=generator)).to(weight)
        if name.endswith("A_log"):
            weight -= 3.0  # else delta nets would forget each token at once


@torch.no_grad()
def full_forward(policy: Policy, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] logits of a single sequence, without a cache or a shared prefix."""
    layout = policy.layout(whole_sequences([len(tokens)]))
    return policy(torch.tensor(tokens), torch.arange(len(tokens)), layout)


def answer_logprobs(policy: Policy, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Tensor:
    """[answer] log-probs of the answer's tokens, by a full forward."""
    logits = full_forward(policy, [*prompt, *answer])[len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1)


@torch.no_grad()
def choices_of(policy: Policy, model: ModelConfig, tokens: Sequence[int]) -> Choices:
    """Choices of the routers in a single pass without a cache."""
    form = ChoiceForm.of(model)
    table = torch.zeros(len(tokens), len(form.layers), form.chosen, dtype=torch.int16)
    columns = {layer: column for column, layer in enumerate(form.layers)}
    recorded = RecordedChoices(table, columns, torch.arange(len(tokens)))
    layout = policy.layout(whole_sequences([len(tokens)]))
    policy(torch.tensor(tokens), torch.arange(len(tokens)), layout, replay=recorded)
    return form.listed(table.flatten(1).numpy())


def experts_in(model: ModelConfig, choices: Choices) -> list[list[set[int]]]:
    """The experts of each token in each layer, whatever their order."""
    form = ChoiceForm.of(model)
    rows, _ = form.table([choices], [len(choices)])
    return [[{*layer} for layer in token] for token in rows.reshape(len(rows), -1, form.chosen).tolist()]


# Trajectories


def trajectory(prompt: list[int], answer: list[int], reward: float = 0.0, text: str = "", **fields: Any) -> Trajectory:
    """Trajectory of one answer. fields: values of its completion; `policy_version` sets all its versions."""
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
    """Pack the chosen trajectories, by default all, into micro-batches."""
    tokens, masks = [each.tokens for each in trajectories], [each.loss_mask for each in trajectories]
    return pack(tokens, masks, range(len(trajectories)) if chosen is None else chosen, limit)


def random_groups(groups: int, group_size: int, seed: int = 0, longest: int = 7) -> list[TrajectoryGroup]:
    """Groups with prompts and answers of mixed lengths, and rewards that mostly differ."""
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

    found = []
    for ordinal in range(groups):
        prompt = tokens(1, 9)
        found.append(TrajectoryGroup(ordinal, Problem("", {}), [answer(prompt) for _ in range(group_size)], {}))
    return found


def with_choices(groups: Sequence[TrajectoryGroup], form: ChoiceForm, seed: int = 0) -> list[TrajectoryGroup]:
    """Groups with random choices of experts, of which a few are unknown. They depend on the tokens so far, so that
    answers agree about the tokens that they share."""

    def token(before: Sequence[int]) -> bytes:
        draw = random.Random(f"{seed} {before}")
        chosen = [draw.sample(range(form.experts), form.chosen) for _ in form.layers]
        return np.array(chosen, form.dtype).tobytes() if draw.random() < 0.9 else b""

    def chosen(one: Trajectory) -> Trajectory:
        return replace(one, choices=[token(one.tokens[: at + 1]) for at in range(len(one.tokens) - 1)])

    return [replace(group, trajectories=[*map(chosen, group.trajectories)]) for group in groups]


def batch_of(groups: list[TrajectoryGroup], first: int, last: int) -> RolloutBatch:
    """Share [first, last) of a recorded batch."""
    failures: Counter[str] = Counter()
    for group in groups[first:last]:
        failures.update(group.failures)
    return RolloutBatch(groups[first:last], list(range(first, last)), 0, len(groups), failures=failures)
