"""Credit by turn, against the equations of GiGPO (arXiv 2505.10978) written out in float64, and its invariants."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import CPU, tiny_run
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.credit import assign_credit
from megatron_rl.learn.training.training_batch import training_batch
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError

REWARDS = st.sampled_from([0.0, 0.25, 1.0, -0.5, 1e-3])


def configured(**grpo: Any) -> RunConfig:
    return tiny_run(grpo={"prompts_per_step": 2, "group_size": 4} | grpo)


@st.composite
def answers(draw: st.DrawFn, agents: tuple[str, ...] = ("",)) -> Trajectory:
    """An answer of one to three sequences with one to three turns each, in any order of time."""
    sequences, first = [], draw(st.integers(1, 3))
    for _ in range(first):
        tokens, mask, turns = [1, 2], [False, False], []
        for _ in range(draw(st.integers(1, 3))):
            length = draw(st.integers(1, 3))
            turns.append(range(len(tokens), len(tokens) + length))
            tokens, mask = [*tokens, *[3] * length, 4], [*mask, *[True] * length, False]
        sequences.append(Branch(tokens, mask, [0.0] * len(tokens), [0] * len(tokens), turns))
    count = sum(len(each.turns) for each in sequences)
    scores = [
        TurnScore(draw(REWARDS), draw(st.sampled_from([None, "a", "b"])), draw(st.sampled_from(agents)), number)
        for number in draw(st.permutations(range(count)))
    ]
    reward = math.fsum(each.reward for each in scores) + draw(st.sampled_from([0.0, 0.5]))
    return Trajectory.of_sequences(sequences, "", reward, "stop").with_turn_scores(tuple(scores))


def groups_of(of_group: st.SearchStrategy[Trajectory]) -> st.SearchStrategy[list[TrajectoryGroup]]:
    listed = st.lists(st.lists(of_group, min_size=1, max_size=4), min_size=1, max_size=2)
    return listed.map(
        lambda its: [TrajectoryGroup(number, Problem("", {}), each, {}) for number, each in enumerate(its)]
    )


GRPO: Any = st.fixed_dictionaries(
    {
        "turn_discount": st.sampled_from([1.0, 0.95, 0.5]),
        "turn_weight": st.sampled_from([1.0, 0.3]),
        "episode_weight": st.sampled_from([1.0, 0.0]),
        "advantage_std": st.sampled_from(["population", "sample", "none"]),
        "baseline": st.sampled_from(["group", "leave_one_out"]),
    }
)


def relative(values: list[float], config: RunConfig) -> list[float]:
    """Return F_norm((value - mean of all)) of one group of values, equation 3 and 7."""
    n, grpo = len(values), config.grpo
    if max(values) - min(values) <= 5e-7 * max(map(abs, values), default=0.0):
        return [0.0] * n
    mean = math.fsum(values) / n
    squares = math.fsum((value - mean) ** 2 for value in values)
    std = {"population": math.sqrt(squares / n), "sample": math.sqrt(squares / max(1, n - 1)), "none": 0.0}
    divisor = 1.0 if grpo.advantage_std == "none" else 1e-4 + std[grpo.advantage_std]
    factor = n / (n - 1) if grpo.baseline == "leave_one_out" else 1.0
    return [factor * (value - mean) / divisor for value in values]


def reference(groups: list[TrajectoryGroup], config: RunConfig) -> list[float]:
    """Return the advantage of every trained token, sequence after sequence."""
    grpo, tokens = config.grpo, []
    for group in groups:
        by_agent: dict[str, dict[int, float]] = {}
        compared: dict[Any, dict[tuple[int, int], float]] = {}
        for number, answer in enumerate(group.trajectories):
            for agent in {score.agent for score in answer.turn_scores}:
                own = [score.reward for score in answer.turn_scores if score.agent == agent]
                by_agent.setdefault(agent, {})[number] = math.fsum(own) if agent else answer.reward
                its = sorted((s for s in answer.turn_scores if s.agent == agent), key=lambda s: s.number)
                for t, score in enumerate(its):  # equation 5
                    value = math.fsum(grpo.turn_discount**k * its[t + k].reward for k in range(len(its) - t))
                    state = score.key if score.key is not None else t
                    compared.setdefault((agent, state), {})[number, score.number] = value
        episode = {
            (number, agent): value
            for agent, its in by_agent.items()
            for number, value in zip(its, relative([*its.values()], config), strict=True)
        }
        step = {
            turn: value
            for its in compared.values()
            for turn, value in zip(its, relative([*its.values()], config), strict=True)
        }
        for number, answer in enumerate(group.trajectories):
            turns = [turn for sequence in answer.sequences for turn in sequence.turns]
            for turn, score in zip(turns, answer.turn_scores, strict=True):  # equation 8
                joint = grpo.episode_weight * episode[number, score.agent]
                joint += grpo.turn_weight * step[number, score.number]
                tokens += [joint] * len(turn)
    return tokens


def of_tokens(groups: list[TrajectoryGroup], config: RunConfig) -> torch.Tensor:
    found = training_batch(groups, assign_credit(groups, config), config, 0, CPU).advantages
    assert found is not None
    return found


@given(groups=groups_of(answers()), grpo=GRPO)
def test_each_token_has_the_advantage_of_its_turn(groups: list[TrajectoryGroup], grpo: dict[str, Any]) -> None:
    config = configured(**grpo)
    expected = torch.tensor(reference(groups, config), dtype=torch.float64)
    torch.testing.assert_close(of_tokens(groups, config).double(), expected, rtol=1e-5, atol=1e-6)


@given(groups=groups_of(answers(agents=("solver", "critic"))), grpo=GRPO)
def test_each_agent_is_compared_with_itself(groups: list[TrajectoryGroup], grpo: dict[str, Any]) -> None:
    config = configured(**grpo)
    expected = torch.tensor(reference(groups, config), dtype=torch.float64)
    torch.testing.assert_close(of_tokens(groups, config).double(), expected, rtol=1e-5, atol=1e-6)


@given(groups=groups_of(answers()), grpo=GRPO, order=st.permutations(range(4)))
def test_the_order_of_answers_does_not_matter_and_advantages_of_turns_sum_to_zero(
    groups: list[TrajectoryGroup], grpo: dict[str, Any], order: list[int]
) -> None:
    (group, *_) = groups
    config = configured(**(grpo | {"episode_weight": 0.0, "baseline": "group"}))
    credit = assign_credit([group], config)
    assert credit.of_spans is not None
    scores = [(one.key, number) for one, number in _turns(group)]
    sums: dict[Any, float] = {}
    for (key, number), value in zip(scores, credit.of_spans.tolist(), strict=True):
        sums[key or number] = sums.get(key or number, 0.0) + value
    assert [*sums.values()] == pytest.approx([0.0] * len(sums), abs=1e-4)
    kept = [number for number in order if number < len(group.trajectories)]
    moved = replace(group, trajectories=[group.trajectories[number] for number in kept])
    for number, place in enumerate(kept):
        own = assign_credit([moved], config).advantages[number]
        torch.testing.assert_close(own, credit.advantages[place], rtol=1e-5, atol=1e-6)


def _turns(group: TrajectoryGroup) -> list[tuple[TurnScore, int]]:
    """Turns of a group's answers with their places in time, in the order of the sequences."""
    return [(score, score.number) for one in group.trajectories for score in one.turn_scores]


def conversation(reward: float, *scores: TurnScore) -> Trajectory:
    """An answer with a turn of two tokens for each score."""
    tokens, turns = [1], []
    for _ in scores:
        turns.append(range(len(tokens), len(tokens) + 2))
        tokens += [2, 2, 9]
    mask = [any(at in turn for turn in turns) for at in range(len(tokens))]
    parts = [Branch(tokens, mask, [0.0] * len(tokens), [0] * len(tokens), turns)]
    numbered = tuple(score._replace(number=number) for number, score in enumerate(scores))
    return Trajectory.of_sequences(parts, "", reward, "stop").with_turn_scores(numbered)


def one_group(*answers: Trajectory) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(0, Problem("", {}), [*answers], {})]


def test_the_example_of_the_page_of_advantages() -> None:
    groups = one_group(
        conversation(1.0, TurnScore(0.0, "start"), TurnScore(1.0, "door")),
        conversation(0.0, TurnScore(0.0, "start"), TurnScore(0.0, "door")),
        conversation(0.0, TurnScore(0.0, "start"), TurnScore(0.0, "pit")),
    )
    credit = assign_credit(groups, configured(turn_discount=0.5, advantage_std="none"))
    assert credit.of_spans is not None
    expected = [2 / 3 + 1 / 3, 2 / 3 + 1 / 2, -1 / 3 - 1 / 6, -1 / 3 - 1 / 2, -1 / 3 - 1 / 6, -1 / 3]
    assert credit.of_spans.tolist() == pytest.approx(expected)


def test_a_group_of_equal_rewards_still_teaches_turns() -> None:
    equal = one_group(
        conversation(1.0, TurnScore(1.0), TurnScore(0.0)), conversation(1.0, TurnScore(0.0), TurnScore(1.0))
    )
    assert assign_credit(equal, configured()).has_gradient == [False, False]
    credit = assign_credit(equal, configured(turn_discount=0.5))
    assert credit.has_gradient == [True, True] and credit.signal.tolist() == [True]


def test_rewards_by_turn_change_nothing_without_the_key() -> None:
    scored = one_group(conversation(1.0, TurnScore(1.0, "a")), conversation(0.0, TurnScore(0.0, "a")))
    plain = [replace(each, trajectories=[replace(one, turn_scores=()) for one in each.trajectories]) for each in scored]
    ours, theirs = assign_credit(scored, configured()), assign_credit(plain, configured())
    assert ours.of_spans is None and torch.equal(ours.advantages, theirs.advantages)


def test_agents_without_turn_discount_have_the_advantage_of_their_own_sum() -> None:
    def duel(first: float, second: float) -> Trajectory:
        solver, critic = TurnScore(first, agent="solver"), TurnScore(second, agent="critic")
        return conversation(0.0, solver, critic, solver._replace(reward=0.0))

    credit = assign_credit(one_group(duel(1.0, 0.0), duel(0.0, 0.5)), configured(advantage_std="none"))
    assert credit.of_spans is not None
    assert credit.of_spans.tolist() == pytest.approx([0.5, -0.25, 0.5, -0.5, 0.25, -0.5])


def test_agents_share_the_penalty_of_their_answer() -> None:
    long, short = (conversation(0.0, TurnScore(1.0, agent="solver"), TurnScore(0.0, agent="critic")) for _ in range(2))
    tokens = [*long.tokens[:-1], *[2] * 6]
    grown = Branch(
        tokens,
        [False, True, True, False, *[True] * 8],
        [0.0] * 12,
        [0] * 12,
        [range(1, 3), range(4, 12)],
    )
    long = Trajectory.of_sequences([grown], "", 0.0, "stop").with_turn_scores(long.turn_scores)
    config = tiny_run(
        sampling={"max_new_tokens": 8},
        grpo={"group_size": 2, "advantage_std": "none", "overlong": {"mode": "penalty", "buffer": 4, "penalty": 1.0}},
    )
    credit = assign_credit(one_group(long, short), config)
    assert credit.of_spans is not None and credit.of_spans.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.5])


def test_agents_are_refused_where_answers_are_compared_over_the_step() -> None:
    groups = one_group(conversation(1.0, TurnScore(1.0, agent="solver")))
    with pytest.raises(ConfigurationError, match=r"name agents.*grpo.baseline batch.*set baseline to group"):
        assign_credit(groups, configured(baseline="batch"))
