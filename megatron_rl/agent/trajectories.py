"""What experience consists of: problems, and trajectories of tokens that say which of them are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.inference.api import Completion, FinishReason

LARGEST_REWARD = 1e18
"""Advantages are computed in fp32, from squares of rewards too."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One task: the prompt as text and what its verifier needs."""

    prompt: str
    golden: Mapping[str, Any]
    environment: str = ""
    """Id of the environment it is of, where there are several."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One scored conversation: prompt, the model's turns, and what the environment said in between, in order."""

    tokens: list[int]
    """[seq]"""
    loss_mask: list[bool]
    """[seq] whether the model sampled the token and it is to be trained on."""
    logprobs: list[float]
    """[seq] the engine's; 0.0 where the model did not sample the token."""
    versions: list[int]
    """[seq] policy version of the weights that sampled the token; -1 where the model did not."""
    turns: list[range]
    """Places of the tokens of each of the model's turns; the first of them follows the prompt."""
    text: str
    """What the model said, without special tokens."""
    reward: float
    finish_reason: FinishReason
    """Of the last turn."""
    tool_calls: int | None = None
    """Calls of tools in it; None where none were offered."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward, by name, where its scoring returned some."""

    @classmethod
    def single(
        cls,
        prompt_tokens: list[int],
        completion: Completion,
        text: str,
        reward: float,
        components: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """One answer to one prompt, all of it trained on."""
        prompt, answer = len(prompt_tokens), len(completion.tokens)
        return cls(
            tokens=prompt_tokens + completion.tokens,
            loss_mask=[False] * prompt + [True] * answer,
            logprobs=[0.0] * prompt + completion.logprobs,
            versions=[-1] * prompt + completion.versions,
            turns=[range(prompt, prompt + answer)],
            text=text,
            reward=reward,
            finish_reason=completion.finish_reason,
            components=components or {},
        )

    def __post_init__(self) -> None:
        """Raises ValueError for lists that do not fit together and for a reward that nothing can be learned from, which
        an agent's author may make."""
        check_reward(self.reward)
        if not len(self.tokens) == len(self.loss_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a trajectory of {len(self.tokens)} tokens has {len(self.loss_mask)} in its loss mask, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions: it needs one of each for a token"
            )
        if not self.turns:
            raise ValueError("a trajectory needs at least one turn of the model")
        if self.loss_mask[:1] == [True]:
            raise ValueError("the first token of a trajectory cannot be trained on: no token before it predicts it")

    @property
    def prompt_length(self) -> int:
        """Tokens before the first turn."""
        return self.turns[0].start

    @property
    def answer_length(self) -> int:
        """Tokens the model sampled, in all turns together."""
        return sum(map(len, self.turns))


def check_reward(reward: float) -> None:
    """Raises ValueError for one that is no number, or too large to be computed with."""
    if not abs(reward) <= LARGEST_REWARD:  # so that NaN is none
        raise ValueError(f"the reward is {reward:g}, no number up to {LARGEST_REWARD:g}")


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """The scored answers to one problem; their mean reward is each one's baseline."""

    ordinal: int
    """Position of the problem in the prompt stream."""
    problem: Problem
    trajectories: list[Trajectory]
    failures: Mapping[str, int]
    """Answers lost, by reason. A failure is never a reward of 0: it is left out of the group."""


@dataclass(frozen=True, slots=True)
class ContrastivePair:
    """A better and a worse answer to one problem. Raises ValueError unless the chosen one has the higher reward."""

    problem: Problem
    chosen: Trajectory
    rejected: Trajectory

    def __post_init__(self) -> None:
        if self.chosen.reward <= self.rejected.reward:
            raise ValueError(
                f"the chosen answer has reward {self.chosen.reward:g}, the rejected one {self.rejected.reward:g}"
            )


def contrastive_pair(group: TrajectoryGroup) -> ContrastivePair | None:
    """Return the best and the worst answer of a group, the first of equal ones; None if no two rewards differ."""
    if not group.trajectories:
        return None
    chosen = max(group.trajectories, key=lambda one: one.reward)
    rejected = min(group.trajectories, key=lambda one: one.reward)
    return ContrastivePair(group.problem, chosen, rejected) if chosen.reward > rejected.reward else None


class Conversation:
    """A trajectory being made, turn by turn.

        conversation = Conversation(prompt_tokens)
        conversation.add_turn(completion)         # the model's answer to conversation.tokens
        conversation.add_observation(tokens)      # what the environment says to it
        ...
        conversation.scored(text, reward)

    It only grows: what the model has sampled is never turned into text and back, which may give other tokens.
    """

    def __init__(self, prompt_tokens: list[int]) -> None:
        self.tokens: list[int] = []
        """All so far: the prompt of the next turn."""
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[range] = []
        self._last: Completion | None = None
        self.add_observation(prompt_tokens)

    def add_turn(self, completion: Completion) -> None:
        first = len(self.tokens)
        self.tokens += completion.tokens
        self._loss_mask += [True] * len(completion.tokens)
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        self._turns.append(range(first, len(self.tokens)))
        self._last = completion

    def cut_off(self) -> Completion:
        """Note that there is no room for another turn, and return the last one: as if the limit had ended it. Raises
        ValueError where the model has had no turn."""
        if self._last is None:
            raise ValueError("a conversation without a turn of the model cannot be cut off")
        self._last = replace(self._last, finish_reason="length")
        return self._last

    def add_observation(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self._loss_mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [-1] * len(tokens)

    def scored(
        self, text: str, reward: float, tool_calls: int | None = None, components: Mapping[str, float] | None = None
    ) -> Trajectory:
        """The whole. Raises ValueError where the model has had no turn.

        text: what the model said, see `Trajectory.text`.
        tool_calls, components: see `Trajectory`.
        """
        if self._last is None:
            raise ValueError("a conversation without a turn of the model is no trajectory")
        return Trajectory(
            tokens=list(self.tokens),
            loss_mask=list(self._loss_mask),
            logprobs=list(self._logprobs),
            versions=list(self._versions),
            turns=list(self._turns),
            text=text,
            reward=reward,
            finish_reason=self._last.finish_reason,
            tool_calls=tool_calls,
            components=components or {},
        )
