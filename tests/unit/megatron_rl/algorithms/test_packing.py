"""Packing changes how fast log-probs are computed, never what they are."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from core_helpers import VOCAB, answer_logprobs, answer_of, packed, prompt_of, tiny_policy, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.model.policy import Policy

TOKENS = st.integers(0, VOCAB - 1)
PROMPT = st.lists(TOKENS, min_size=1, max_size=12)
FEW_TOKENS = st.integers(0, 1)  # with which answers often begin alike
ANSWER = st.one_of(
    st.lists(FEW_TOKENS, min_size=1, max_size=6),
    st.lists(TOKENS, min_size=1, max_size=12),
    st.lists(TOKENS, min_size=24, max_size=36),
)
GROUP = st.tuples(PROMPT, st.lists(ANSWER, min_size=1, max_size=5))


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Answers of several prompts; the answers to one prompt stand together, and prompts may come twice."""
    return [
        trajectory(prompt, answer)
        for prompt, answers in draw(st.lists(GROUP, min_size=1, max_size=4))
        for answer in answers
    ]


LIMIT = st.integers(1, 250)


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform)


def targets_of(trajectories: list[Trajectory]) -> Tensor:
    return torch.tensor([token for trajectory in trajectories for token in answer_of(trajectory)])


def logprobs_of(policy: Policy, trajectories: list[Trajectory], limit: int) -> Tensor:
    """[answer tokens], in the order of the trajectories; NaN where no micro-batch holds the token."""
    targets = targets_of(trajectories)
    parts = torch.full((len(targets),), torch.nan)
    for micro in packed(trajectories, limit=limit):
        logits = policy(micro.tokens, micro.positions, policy.layout(micro), micro.select)
        logprobs, _ = token_logprobs(logits, micro.targets, 1.0)
        parts = parts.index_put((micro.trained,), logprobs)
    return parts


@settings(deadline=None, max_examples=40)
@given(trajectories=batches(), limit=LIMIT)
def test_logprobs_are_those_of_each_sequence_alone(policy: Policy, trajectories: list[Trajectory], limit: int) -> None:
    alone = torch.cat([answer_logprobs(policy, prompt_of(each), answer_of(each)) for each in trajectories])
    with torch.no_grad():
        together = logprobs_of(policy, trajectories, limit)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@given(trajectories=batches(), limit=LIMIT, data=st.data())
def test_every_chosen_answer_token_appears_exactly_once(trajectories: list[Trajectory], limit: int, data: Any) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(trajectories) - 1), unique=True))
    starts = [sum(len(answer_of(each)) for each in trajectories[:index]) for index in range(len(trajectories))]
    expected = [starts[index] + t for index in chosen for t in range(len(answer_of(trajectories[index])))]
    made = packed(trajectories, chosen, limit)
    assert [token for micro in made for token in micro.trained.tolist()] == expected
    assert all(len(micro.select) == len(micro.targets) == len(micro.trained) > 0 for micro in made)


@given(trajectories=batches(), limit=LIMIT)
def test_the_limit_holds_but_for_an_answer_that_alone_exceeds_it(trajectories: list[Trajectory], limit: int) -> None:
    owner = [index for index, each in enumerate(trajectories) for _ in answer_of(each)]
    for micro in packed(trajectories, limit=limit):
        answers = {owner[token] for token in micro.trained.tolist()}
        assert len(micro.tokens) <= limit or len(answers) == 1


@given(trajectories=batches(), limit=LIMIT)
def test_no_micro_batch_could_have_taken_the_next_answer(trajectories: list[Trajectory], limit: int) -> None:
    """Together with the limit: there are as few as the order allows."""
    owner = [index for index, each in enumerate(trajectories) for _ in answer_of(each)]
    for micro in packed(trajectories, limit=limit)[:-1]:
        members = sorted({owner[token] for token in micro.trained.tolist()})
        assert counted(trajectories[members[0] : members[-1] + 2]) > limit


def counted(trajectories: list[Trajectory]) -> int:
    """Packed tokens as the limit counts them: neighbours share their prompt and nothing else."""
    prompts = [prompt for prompt, _ in groupby(prompt_of(each) for each in trajectories)]
    return sum(map(len, prompts)) + sum(len(answer_of(each)) - 1 for each in trajectories)


@given(prompt=PROMPT, answers=st.lists(ANSWER, min_size=1, max_size=6))
def test_a_group_computes_every_beginning_once_and_no_last_token(prompt: list[int], answers: list[list[int]]) -> None:
    trajectories = [trajectory(prompt, answer) for answer in answers]
    (micro,) = packed(trajectories)
    beginnings = {tuple(answer[:length]) for answer in answers for length in range(1, len(answer))}
    assert len(micro.tokens) == len(prompt) + len(beginnings)


@settings(deadline=None, max_examples=25)
@given(trajectories=batches(), limit=LIMIT, seed=st.integers(0, 100))
def test_micro_batches_add_up_to_the_loss_and_gradient_of_one(
    policy: Policy, trajectories: list[Trajectory], limit: int, seed: int
) -> None:
    weights = torch.randn(len(targets_of(trajectories)), generator=torch.Generator().manual_seed(seed))

    def loss_and_gradient(limit: int) -> tuple[Tensor, list[Tensor]]:
        policy.zero_grad()
        loss = (logprobs_of(policy, trajectories, limit) * weights).sum()
        loss.backward()
        return loss.detach(), [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]

    one, many = loss_and_gradient(10**9), loss_and_gradient(limit)
    torch.testing.assert_close(many, one, rtol=1e-4, atol=1e-4)


def test_nothing_chosen_makes_no_micro_batch() -> None:
    assert packed([trajectory([1], [2])], []) == []


@given(st.floats(0.1, 3.0), st.integers(0, 1000))
def test_logprobs_and_entropy_are_of_the_tempered_distribution(temperature: float, seed: int) -> None:
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed))
    targets = torch.arange(6)
    logprobs, entropy = token_logprobs(logits, targets, temperature)
    probs = (logits.double() / temperature).softmax(-1)
    torch.testing.assert_close(logprobs.double(), probs[torch.arange(6), targets].log(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), torch.special.entr(probs).sum(-1), rtol=1e-4, atol=1e-5)


def test_greedy_decoding_counts_as_temperature_one() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    assert torch.equal(token_logprobs(logits, torch.arange(4), 0.0)[0], token_logprobs(logits, torch.arange(4), 1.0)[0])
