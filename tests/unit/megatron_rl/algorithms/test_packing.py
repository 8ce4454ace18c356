"""Packing changes how fast log-probs are computed, never what they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from core_helpers import VOCAB, answer_logprobs, answer_of, packed, prompt_of, tiny_model, tiny_policy, trajectory
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.agent.trajectories import Trajectory
from megatron_rl.algorithms.bins import BinLimit
from megatron_rl.algorithms.logprobs import token_logprobs
from megatron_rl.algorithms.packing import HEAD, MicroBatch, Packing, pack
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.platform.dense_attention import branches
from megatron_rl.model.policy import Policy

TOKENS = st.integers(0, VOCAB - 1)
PROMPT = st.lists(TOKENS, min_size=1, max_size=12)
FEW_TOKENS = st.integers(0, 1)  # with which answers often begin alike
ANSWER = st.one_of(
    st.lists(FEW_TOKENS, min_size=1, max_size=6),
    st.lists(TOKENS, min_size=1, max_size=12),
    st.lists(TOKENS, min_size=24, max_size=36),
)
SECOND_TURN = st.one_of(st.none(), st.tuples(st.lists(TOKENS, max_size=3), ANSWER))
"""Words of the environment after an answer and the answer to them, a branch of the rollout; None: no branch."""
GROUP = st.tuples(PROMPT, st.lists(st.tuples(ANSWER, SECOND_TURN), min_size=1, max_size=5))


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    """Answers to several prompts; the answers to one prompt are neighbours, and prompts may repeat. A branch follows
    its answer, which is a part of its prompt."""
    made = []
    for prompt, answers in draw(st.lists(GROUP, min_size=1, max_size=4)):
        for answer, second_turn in answers:
            made.append(trajectory(prompt, answer))
            if second_turn is not None:
                said, more = second_turn
                made.append(trajectory([*prompt, *answer, *said], more))
    return made


LIMIT = st.integers(1, 250)
ROWS = st.sampled_from([1, 3, 2**32])  # that count as much as a token


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, tiny_model(max_position_embeddings=96))


def targets_of(trajectories: list[Trajectory]) -> Tensor:
    return torch.tensor([token for trajectory in trajectories for token in answer_of(trajectory)])


def logprobs_of(policy: Policy, trajectories: list[Trajectory], limit: int) -> Tensor:
    """[answer tokens], in the order of the trajectories; NaN for tokens in no micro-batch."""
    targets = targets_of(trajectories)
    parts = torch.full((len(targets),), torch.nan)
    for micro in packed(trajectories, limit=limit):
        logits = policy(micro.tokens, micro.positions, policy.layout(micro), micro.select)
        logprobs, _ = token_logprobs(logits, micro.targets, 1.0)
        parts = parts.index_put((micro.trained,), logprobs)
    return parts


@examples(20)
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
    assert sorted(token for micro in made for token in micro.trained.tolist()) == sorted(expected)
    targets = targets_of(trajectories)
    assert all(torch.equal(micro.targets, targets[micro.trained]) for micro in made)
    assert all(len(micro.select) == len(micro.targets) == len(micro.trained) > 0 for micro in made)


@given(trajectories=batches(), data=st.data())
def test_one_micro_batch_keeps_the_order_of_the_chosen_sequences(trajectories: list[Trajectory], data: Any) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(trajectories) - 1), min_size=1))
    starts = [sum(len(answer_of(each)) for each in trajectories[:index]) for index in range(len(trajectories))]
    (made,) = packed(trajectories, chosen)
    expected = [starts[index] + t for index in chosen for t in range(len(answer_of(trajectories[index])))]
    assert made.trained.tolist() == expected


@given(trajectories=batches(), limit=LIMIT, rows=ROWS)
def test_limit_holds_except_for_answers_that_exceed_it_alone(
    trajectories: list[Trajectory], limit: int, rows: int
) -> None:
    """Packed tokens, and the cost of tokens and rows together, which for a single answer is its number of tokens."""
    owner = [index for index, each in enumerate(trajectories) for _ in answer_of(each)]
    for micro in in_room(trajectories, BinLimit(limit, rows)):
        alone = max(len(trajectories[owner[token]].tokens) - 1 for token in micro.trained.tolist())
        assert len(micro.tokens) + (rows_of(micro) - len(micro.tokens)) / rows <= max(limit, alone)


def rows_of(micro: MicroBatch) -> int:
    """Rows that are gathered if branches attend one by one."""
    trees = pairwise(micro.cu_seqlens.tolist())
    return sum(len(branch) for first, stop in trees for branch in branches(micro.subtree_ends, first, stop))


def in_room(trajectories: list[Trajectory], limit: BinLimit) -> list[MicroBatch]:
    tokens, masks = [each.tokens for each in trajectories], [each.loss_mask for each in trajectories]
    packing = Packing(tokens, masks, range(len(tokens)))
    return [packing.microbatch(names) for names in packing.bins(limit)]


@given(trajectories=batches(), limit=LIMIT, rows=ROWS)
def test_packing_needs_no_more_micro_batches_than_next_fit(
    trajectories: list[Trajectory], limit: int, rows: int
) -> None:
    assert len(in_room(trajectories, BinLimit(limit, rows))) <= next_fit(trajectories, limit, rows)


def next_fit(trajectories: list[Trajectory], limit: int, rows_per_token: int) -> int:
    """Number of micro-batches if filled in order, with only the prompts of neighbours shared."""
    made, used, before = 0, limit + 1.0, None
    for each in trajectories:
        prompt, rest = prompt_of(each), len(answer_of(each)) - 1
        beside = rest + len(prompt) / rows_per_token if prompt == before else rest + len(prompt)
        if used + beside > limit:
            made, used = made + 1, rest + len(prompt)
        else:
            used += beside
        before = prompt
    return made


@given(prompt=PROMPT, answers=st.lists(ANSWER, min_size=1, max_size=6))
def test_group_computes_every_prefix_once_and_no_last_token(prompt: list[int], answers: list[list[int]]) -> None:
    trajectories = [trajectory(prompt, answer) for answer in answers]
    (micro,) = packed(trajectories)
    prefixes = {tuple(answer[:length]) for answer in answers for length in range(1, len(answer))}
    assert len(micro.tokens) == len(prompt) + len(prefixes)


@given(shared=st.lists(st.integers(1, HEAD + 40), min_size=1, max_size=6), length=st.integers(HEAD + 40, HEAD + 90))
def test_common_prefixes_of_long_answers_are_found(shared: list[int], length: int) -> None:
    """Each answer consists of zeros and then ones; the zeros are its common prefix with the last answer, of zeros
    only."""
    answers = [*([0] * each + [1] * (length - each) for each in shared), [0] * length]
    (micro,) = packed([trajectory([5, 6], answer) for answer in answers])
    prefixes = {tuple(answer[:size]) for answer in answers for size in range(1, length)}
    assert len(micro.tokens) == 2 + len(prefixes)


@examples(12)
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


def test_no_chosen_sequences_make_no_micro_batch() -> None:
    assert packed([trajectory([1], [2])], []) == []


def test_tokens_after_the_last_trained_one_are_not_packed() -> None:
    """No trained token follows, for example, the last result of a tool."""
    (micro,) = pack([[5, 1, 2, 3, 4]], [[False, True, True, False, False]], [0], 100)
    assert (micro.tokens.tolist(), micro.targets.tolist()) == ([5, 1], [1, 2])


def test_answers_share_their_prompt_also_with_branches_between_them() -> None:
    prompt, answers = [5, 6, 7], [[1, 2], [3, 4]]
    made = []
    for answer in answers:
        made += [trajectory(prompt, answer), trajectory([*prompt, *answer, 9], [8, 0])]
    (micro,) = packed(made)
    assert micro.tokens.tolist() == [*prompt, 1, 2, 9, 8, 3, 4, 9, 8]


# Choices of experts


def choices_of(numbers: Sequence[int]) -> list[bytes]:
    """One layer with two of nine experts; 9 is an unknown choice."""
    return [b"" if number == 9 else bytes([number, (number + 1) % 9]) for number in numbers]


def packed_choices(tokens: list[list[int]], prompt: int, choices: list[list[int]]) -> tuple[list[int], list[int]]:
    """Tokens and first experts of the single micro-batch; -1 where the choice is unknown."""
    masks = [[False] * prompt + [True] * (len(each) - prompt) for each in tokens]
    form = ChoiceForm((1,), 2, 9)
    packing = Packing(tokens, masks, range(len(tokens)), (form, [*map(choices_of, choices)]))
    micro = packing.microbatch(range(len(tokens)))
    assert micro.choices is not None
    given, known = micro.choices.given[:, 0, 0].tolist(), micro.choices.known.tolist()
    return micro.tokens.tolist(), [each if knows else -1 for each, knows in zip(given, known, strict=True)]


def test_each_packed_token_has_its_own_choices() -> None:
    tokens, choices = packed_choices([[7, 7, 1, 2], [7, 7, 3, 4, 5]], 2, [[0, 1, 2], [0, 1, 5, 6]])
    assert (tokens, choices) == ([7, 7, 1, 3, 4], [0, 1, 2, 5, 6])


def test_a_shared_token_has_the_choices_of_the_first_answer_that_knows_them() -> None:
    tokens, choices = packed_choices([[7, 8, 1, 2, 3], [7, 8, 1, 4, 5]], 2, [[0, 9, 9, 2], [3, 1, 5, 6]])
    assert (tokens, choices) == ([7, 8, 1, 2, 4], [0, 1, 5, 2, 6])


def test_choices_that_no_answer_knows_stay_unknown() -> None:
    tokens, choices = packed_choices([[7, 8, 1, 2], [7, 8, 3, 4]], 2, [[0, 9], []])
    assert (tokens, choices) == ([7, 8, 1, 3], [0, -1, -1, -1])
