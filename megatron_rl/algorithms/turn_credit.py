"""Credit by turn: the advantages of the turns of agents whose environment reports rewards by turn.

    A = episode_weight A_episode + turn_weight A_turn        GiGPO, arXiv 2505.10978, equation 8

A_episode is the advantage of the answer, or, where several agents speak in it, that of the turn's agent: the sum of the
agent's rewards relative to its sums in the other answers to the prompt. A_turn is the discounted return of the turn
(equation 5) relative to the returns of the group's turns with the same key (equations 6 and 7), of one agent.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import Branch, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.advantages import group_advantages, leave_one_out_advantages
from megatron_rl.algorithms.answers import ScoredAnswers, fp64
from megatron_rl.model.platform.host_tensors import int64
from megatron_rl.recipe.grpo import GrpoConfig


@dataclass(frozen=True, slots=True)
class ScoredTurns:
    """Turns of the answers of some groups that have rewards by turn, answer after answer, each in the order of its
    sequences; on the CPU."""

    answer: Tensor  # [turns] int64, index of the answer
    returns: Tensor  # [turns] fp64, discounted by `grpo.turn_discount`
    compared: Tensor  # [turns] int64, index of the turns that a turn is compared with
    num_compared: int
    speaker: Tensor  # [turns] int64, index of the pair of answer and agent
    speaker_answer: Tensor  # [speakers] int64, index of the answer
    speaker_group: Tensor  # [speakers] int64, index of the pair of group and agent
    num_speaker_groups: int
    speaker_rewards: Tensor  # [speakers] fp64, sum of the rewards of its turns
    named: Tensor  # [turns] bool, whether the turn names its agent


class _Indices:
    """Numbers for values, in the order in which they come up."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def __call__(self, value: Hashable) -> int:
        return self._known.setdefault(value, len(self._known))

    def __len__(self) -> int:
        return len(self._known)


def scored_turns(groups: Sequence[TrajectoryGroup], discounts: Sequence[float]) -> ScoredTurns:
    """Return the turns of all answers that have rewards by turn.

    discounts: [groups] discount of each group's returns.
    """
    rows: defaultdict[str, list[int]] = defaultdict(list)
    returns: list[float] = []
    compared, speakers, speaker_groups = _Indices(), _Indices(), _Indices()
    of_speakers: list[tuple[int, int]] = []
    rewards: list[list[float]] = []
    answer = -1
    for number, (group, discount) in enumerate(zip(groups, discounts, strict=True)):
        for trajectory in group.trajectories:
            answer += 1
            its_returns, places = _returns(trajectory, discount)
            returns += its_returns
            for score, place in zip(trajectory.turn_scores, places, strict=True):
                state = ("number", place) if score.key is None else ("key", score.key)
                speaker = speakers((answer, score.agent))
                if speaker == len(of_speakers):
                    of_speakers.append((answer, speaker_groups((number, score.agent))))
                    rewards.append([])
                rewards[speaker].append(score.reward)
                rows["answer"].append(answer)
                rows["compared"].append(compared((number, score.agent, state)))
                rows["speaker"].append(speaker)
                rows["named"].append(bool(score.agent))
    return ScoredTurns(
        answer=int64(rows["answer"]),
        returns=fp64(returns),
        compared=int64(rows["compared"]),
        num_compared=len(compared),
        speaker=int64(rows["speaker"]),
        speaker_answer=int64([answer for answer, _ in of_speakers]),
        speaker_group=int64([group for _, group in of_speakers]),
        num_speaker_groups=len(speaker_groups),
        speaker_rewards=fp64([math.fsum(its) for its in rewards]),
        named=torch.tensor(rows["named"], dtype=torch.bool),
    )


def _returns(answer: Trajectory, discount: float) -> tuple[list[float], list[int]]:
    """Return the discounted return of each turn, over the later turns of its agent, and its place among them."""
    scores = answer.turn_scores
    returns, places = [0.0] * len(scores), [0] * len(scores)
    in_time = sorted(range(len(scores)), key=lambda index: scores[index].number)
    following: defaultdict[str, float] = defaultdict(float)
    for index in reversed(in_time):
        agent = scores[index].agent
        returns[index] = following[agent] = scores[index].reward + discount * following[agent]
    spoken: defaultdict[str, int] = defaultdict(int)
    for index in in_time:
        agent = scores[index].agent
        places[index] = spoken[agent]
        spoken[agent] += 1
    return returns, places


def turn_advantages(turns: ScoredTurns, answers: Tensor, speakers: Tensor, config: GrpoConfig) -> Tensor:
    """Return the advantage of each turn under one algorithm, [turns] fp32, without gradient.

    Args:
        answers: [answers] their advantages.
        speakers: [speakers] advantages of the agents of each answer; read for turns that name their agent.
    """
    episode = torch.where(turns.named, speakers[turns.speaker], answers[turns.answer])
    if config.turn_discount is None:
        return episode
    baseline = leave_one_out_advantages if config.baseline == "leave_one_out" else group_advantages
    steps = baseline(turns.returns, turns.compared, turns.num_compared, std=config.advantage_std)
    return (config.episode_weight * episode.double() + config.turn_weight * steps.double()).float()


def answers_of_agents(turns: ScoredTurns, answers: ScoredAnswers) -> ScoredAnswers:
    """Return a table whose answers are what one agent says in an answer; its group has those of the same agent. The
    penalties of an answer (`grpo.overlong`, `grpo.length_penalty`) count for each agent in it."""
    rewards = turns.speaker_rewards + answers.penalties[turns.speaker_answer]
    return replace(
        answers.each(lambda column: column[turns.speaker_answer]),
        group=turns.speaker_group,
        num_groups=turns.num_speaker_groups,
        scored=turns.speaker_rewards,
        rewards=rewards,
    )


def spread(answers: Sequence[Trajectory], of_turns: Tensor, of_answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the answer of each span (`spans`), its trained tokens, and its advantage, [spans] each.

    Args:
        of_turns: [turns] advantages, of the answers that have rewards by turn.
        of_answers: [answers] advantages of the others.
    """
    rows = [
        (index, part.loss_mask[its.start : its.stop].count(True), bool(answer.turn_scores))
        for index, answer in enumerate(answers)
        for part, its in spans(answer)
    ]
    of_answer = int64([index for index, _, _ in rows])
    advantages = of_answers[of_answer]
    advantages[torch.tensor([scored for _, _, scored in rows], dtype=torch.bool)] = of_turns
    return of_answer, int64([tokens for _, tokens, _ in rows]), advantages


def spans(answer: Trajectory) -> Iterator[tuple[Branch, range]]:
    """Yield the parts of an answer whose tokens have one advantage: its turns, or its sequences if it has no rewards by
    turn."""
    for sequence in answer.sequences:
        for part in sequence.turns if answer.turn_scores else [range(len(sequence.tokens))]:
            yield sequence, part
