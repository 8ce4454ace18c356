"""A two-turn agent with an observation between the turns: only sampled tokens are trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from bank_helpers import collect
from core_helpers import build_run, full_forward, tiny_run

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.keys import turn_key
from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryBuilder, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.run.state import Run

PROBLEMS = [Problem("1+2=", {}), Problem("7-3=", {}), Problem("30+4=", {}), Problem("9=", {})]
WORDS = "+1="


class AsksTwice(GroupedRolloutGenerator):
    """The first turns of a group share one request; then each sample has its own conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def training_problems(self) -> Sequence[Problem]:
        return PROBLEMS

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        prompt = self.tokenizer.encode(request.problem.prompt)
        asked = GenerationRequest(prompt, request.group_size, request.sampling, request.key, request.ordinal)
        first = await request.inference.generate(asked)
        conversations = (self._go_on(request, prompt, sample, answer) for sample, answer in enumerate(first))
        return TrajectoryGroup(request.ordinal, request.problem, await asyncio.gather(*conversations), {})

    async def _go_on(
        self, request: GroupRolloutRequest, prompt: list[int], sample: int, first: Completion
    ) -> Trajectory:
        conversation = TrajectoryBuilder(prompt)
        conversation.add_turn(first)
        conversation.add_observation(self.tokenizer.encode(WORDS))
        key = turn_key(request.key, sample, 1)
        asked = GenerationRequest(list(conversation.tokens), 1, request.sampling, key, request.ordinal)
        (second,) = await request.inference.generate(asked)
        conversation.add_turn(second)
        text = self.tokenizer.decode(first.tokens) + self.tokenizer.decode(second.tokens)
        return conversation.scored(text, float(len(set(second.tokens))))


@pytest.fixture
def run(platform: Any, groups: Any) -> Iterator[Run]:
    config = tiny_run(sampling={"max_new_tokens": 8}, inference={"max_batch": 6}, optimizer={"learning_rate": 1e-2})
    built = build_run(config, platform, groups, scale=0.15)
    yield built
    built.generation.loop.close()


def agent_of(run: Run) -> AsksTwice:
    tokenizer: Any = run.environment.tokenizer  # type: ignore[attr-defined]
    return AsksTwice(tokenizer)


def test_model_sampled_exactly_what_the_loss_mask_says(run: Run) -> None:
    """Their log-probs equal those of a forward pass over the whole conversation."""
    run.engine.policy_version = 3
    agent = agent_of(run)
    groups = collect(run, agent=agent)
    conversations = [one for group in groups for one in group.trajectories]
    assert len(conversations) == 16
    words = agent.tokenizer.encode(WORDS)
    for group in groups:
        for one in group.trajectories:
            first, second = one.turns
            assert one.tokens[: first.start] == agent.tokenizer.encode(group.problem.prompt)
            assert one.tokens[first.stop : second.start] == words
            assert second.stop == len(one.tokens)
            sampled = [place in first or place in second for place in range(len(one.tokens))]
            assert one.loss_mask == sampled
            assert one.versions == [3 if each else -1 for each in sampled]
            logprobs = full_forward(run.engine.runner.policy, one.tokens).log_softmax(-1)
            expected = logprobs[:-1].gather(1, torch.tensor(one.tokens[1:])[:, None]).squeeze(1)
            mask = torch.tensor(one.loss_mask[1:])
            torch.testing.assert_close(torch.tensor(one.logprobs[1:]), expected * mask, rtol=1e-5, atol=1e-5)
    assert len({tuple(one.tokens[one.turns[1].start :]) for one in conversations}) > 8


def test_observations_do_not_contribute_to_the_loss(run: Run) -> None:
    """Every sampled token contributes once, and the log-probs of observations have no effect."""
    groups = collect(run, agent=agent_of(run))
    before = [weight.detach().clone() for weight in run.trainer.policy.parameters()]
    gradients = []
    for beside_words in (0.0, -9.0):
        changed = [
            replace(group, trajectories=[with_logprobs(one, beside_words) for one in group.trajectories])
            for group in groups
        ]
        run.trainer.policy_version = 0
        with torch.no_grad():
            for weight, value in zip(run.trainer.policy.parameters(), before, strict=True):
                weight.copy_(value)
        stats = run.trainer.train(RolloutBatch(changed, list(range(len(changed))), 0, len(changed)), 1)
        gradients.append([weight.main_grad.clone() for weight in run.trainer.policy.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    assert any(gradient.any() for gradient in gradients[0])
    sampled = sum(sum(one.loss_mask) for group in groups for one in group.trajectories)
    assert stats.batch.answer_tokens == sampled
    assert stats.loss is not None
    assert float(stats.loss.tokens) == sampled


def with_logprobs(one: Trajectory, beside_words: float) -> Trajectory:
    pairs = zip(one.logprobs, one.loss_mask, strict=True)
    return replace(one, logprobs=[value if sampled else beside_words for value, sampled in pairs])
