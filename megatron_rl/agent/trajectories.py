"""Problems, and trajectories: tokens with a mask of the trained ones, in one sequence or several branches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rl.agent.reward_value import LARGEST_REWARD, TurnScore, check_turns
from megatron_rl.generate.engine.interface import Completion, FinishReason
from megatron_rl.model.choices import Choices, merged

OUTPUT_LIMIT = 4000

UNSAMPLED = -1
"""Policy version of tokens that the model did not sample."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One task: the prompt as text, and the data its verifier needs."""

    prompt: str
    golden: Mapping[str, Any]
    environment: str = ""
    """Id of the problem's environment; empty if there is only one environment."""
    is_prompt: bool = True
    """Whether the model sees `prompt`. Otherwise a program writes the prompts, and `prompt` names the problem in logs
    and records."""
    teacher_prompt: str | None = None
    """Prompt that a teacher (`distill`) reads in place of `prompt`, for example with a hint or a worked solution; None:
    the same. The answer follows it unchanged."""
    questions: frozenset[bytes] = field(default=frozenset(), compare=False)
    """Keys of the question (`words_key`), by which the problem is known in whatever prompt asks it; empty: it is known
    by its prompt alone."""


@dataclass(frozen=True, slots=True)
class Branch:
    """One sequence of tokens: the prompt, the model's turns, and the environment's messages between them."""

    tokens: list[int]
    """[seq]"""
    loss_mask: list[bool]
    """[seq] whether the token is trained on; the model sampled it."""
    logprobs: list[float]
    """[seq] log-probs of the engine; 0.0 for tokens that the model did not sample."""
    versions: list[int]
    """[seq] policy version of the weights that sampled the token; UNSAMPLED if the model did not sample it."""
    turns: list[range]
    """Token range of each of the model's turns; the first turn follows the prompt."""
    choices: Choices = field(default_factory=list, kw_only=True)
    """Experts that the engine chose for the tokens, at most [seq]; empty unless `model.router_replay` is rollout."""
    grammars: list[str] = field(default_factory=list, kw_only=True)
    """[turns] grammar into which each turn was forced, "" for none; an empty list if none was. Log-probs of a forced
    turn are over the tokens that its grammar allows: see `model/grammar.py`."""

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.loss_mask) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"a trajectory of {len(self.tokens)} tokens has {len(self.loss_mask)} loss mask entries, "
                f"{len(self.logprobs)} logprobs and {len(self.versions)} versions: every token needs one of each"
            )
        if len(self.choices) > len(self.tokens):
            raise ValueError(f"a trajectory of {len(self.tokens)} tokens has choices of {len(self.choices)}")
        if len(self.grammars) not in (0, len(self.turns)):
            raise ValueError(f"a trajectory of {len(self.turns)} turns has grammars of {len(self.grammars)}")
        if not self.turns:
            raise ValueError("a trajectory needs at least one turn of the model")
        if self.loss_mask[:1] == [True]:
            raise ValueError("the first token of a trajectory cannot be trained on: no token before it predicts it")

    @property
    def prompt_length(self) -> int:
        return self.turns[0].start

    @property
    def sampled_length(self) -> int:
        return sum(map(len, self.turns))


@dataclass(frozen=True, slots=True)
class Trajectory(Branch):
    """One scored rollout. Most have a single sequence of tokens. A program that edits its conversation, or has several,
    makes further ones, which share the reward. Each sampled token is a turn's in one sequence only; in the others that
    contain it, it is context."""

    text: str
    """Text of the model's turns, without special tokens."""
    reward: float
    finish_reason: FinishReason
    tool_calls: int | None = None
    """Number of tool calls; None if no tools were offered."""
    components: Mapping[str, float] = field(default_factory=dict)
    branches: tuple[Branch, ...] = ()
    output: str = ""
    """End of what a program or a reward function printed, at most OUTPUT_LIMIT characters."""
    turn_scores: tuple[TurnScore, ...] = ()
    """Rewards of the turns of all sequences, in the order of the sequences; empty if the environment reports none."""

    @classmethod
    def single(
        cls,
        prompt_tokens: list[int],
        completion: Completion,
        text: str,
        reward: float,
        components: Mapping[str, float] | None = None,
        output: str = "",
    ) -> Trajectory:
        prompt, answer = len(prompt_tokens), len(completion.tokens)
        return cls(
            tokens=prompt_tokens + completion.tokens,
            loss_mask=[False] * prompt + [True] * answer,
            logprobs=[0.0] * prompt + completion.logprobs,
            versions=[UNSAMPLED] * prompt + completion.versions,
            turns=[range(prompt, prompt + answer)],
            text=text,
            reward=reward,
            finish_reason=completion.finish_reason,
            components=components or {},
            output=output,
            choices=completion.choices,
            grammars=[completion.grammar] if completion.grammar else [],
        )

    @classmethod
    def of_sequences(
        cls,
        sequences: Sequence[Branch],
        text: str,
        reward: float,
        finish_reason: FinishReason,
        *,
        tool_calls: int | None = None,
        components: Mapping[str, float] | None = None,
        output: str = "",
    ) -> Trajectory:
        """Return the trajectory with these sequences. Raises ValueError if there are none."""
        if not sequences:
            raise ValueError("a trajectory needs at least one sequence of tokens")
        own, *branches = sequences
        return cls(
            tokens=own.tokens,
            loss_mask=own.loss_mask,
            logprobs=own.logprobs,
            versions=own.versions,
            turns=own.turns,
            text=text,
            reward=reward,
            finish_reason=finish_reason,
            tool_calls=tool_calls,
            components=components or {},
            branches=tuple(branches),
            output=output,
            choices=own.choices,
            grammars=own.grammars,
        )

    def __post_init__(self) -> None:
        Branch.__post_init__(self)
        check_reward(self.reward)
        if self.turn_scores:
            check_turns(self.turn_scores, sum(len(each.turns) for each in self.sequences))
            if any(each.loss_mask.count(True) > _trained_in_turns(each) for each in self.sequences):
                raise ValueError("a token is trained on that belongs to no turn, and rewards are by turn")
        if len(self.output) > OUTPUT_LIMIT:
            raise ValueError(f"an output of {len(self.output)} characters: a trajectory keeps {OUTPUT_LIMIT} at most")

    def with_turn_scores(self, scores: tuple[TurnScore, ...]) -> Trajectory:
        """Return the trajectory with rewards by turn. Raises WrongReward if they are not as many as its turns."""
        return replace(self, turn_scores=scores) if scores else self

    @property
    def sequences(self) -> tuple[Branch, ...]:
        """All sequences of tokens: its own first, then the branches."""
        return (self, *self.branches)

    @property
    def answer_length(self) -> int:
        return sum(map(len, self.turns)) + sum([branch.sampled_length for branch in self.branches])


def _trained_in_turns(sequence: Branch) -> int:
    return sum(sequence.loss_mask[turn.start : turn.stop].count(True) for turn in sequence.turns)


def check_reward(reward: float) -> None:
    """Raise ValueError if the reward is not a number or is too large to compute with."""
    if not abs(reward) <= LARGEST_REWARD:  # written so that NaN fails too
        raise ValueError(f"the reward is {reward:g}: it must be a number of magnitude {LARGEST_REWARD:g} at most")


@dataclass(frozen=True, slots=True)
class TrajectoryGroup:
    """Scored answers to one problem; their mean reward is the baseline of each."""

    ordinal: int
    problem: Problem
    trajectories: list[Trajectory]
    failures: Mapping[str, int]
    """Number of lost answers by reason. A lost answer has no reward and is excluded from the group."""
    final_answers: Sequence[str | None] = ()
    """One per trajectory, from an agent in another process that compares answers, in an evaluation; else empty."""
    lost: tuple[int, ...] = ()
    """Numbers of the samples that are lost, if the agent knows them."""
    begun_version: int = UNSAMPLED
    """Policy version under which the problem was first submitted, on which its random numbers depend; UNSAMPLED outside
    the prompt stream."""

    @property
    def samples(self) -> list[int]:
        """Number of each trajectory among the group's samples, as far as `lost` is known."""
        lost = {*self.lost}
        return [sample for sample in range(len(self.trajectories) + len(lost)) if sample not in lost]

    @property
    def sequences(self) -> list[Branch]:
        """Sequences of the first trajectory, then of the next ones."""
        return [sequence for trajectory in self.trajectories for sequence in trajectory.sequences]

    @property
    def versions(self) -> set[int]:
        """Policy versions that sampled its tokens."""
        return set().union(*(sequence.versions for sequence in self.sequences)) - {UNSAMPLED}


class TrajectoryBuilder:
    """Builder of a trajectory, turn by turn.

        builder = TrajectoryBuilder(prompt_tokens)
        builder.add_turn(completion)         # the model's answer to builder.tokens
        builder.add_observation(tokens)      # the environment's reply
        ...
        builder.scored(text, reward)

    Tokens are only appended: sampled tokens are never decoded and encoded again, which could give other tokens.
    """

    def __init__(self, prompt_tokens: list[int]) -> None:
        self.tokens: list[int] = []
        """All tokens so far: the prompt of the next turn."""
        self._loss_mask: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._turns: list[range] = []
        self._choices: Choices = []
        self._grammars: list[str] = []  # of each turn
        self._last: Completion | None = None
        self.add_observation(prompt_tokens)

    def add_turn(self, completion: Completion) -> None:
        first = len(self.tokens)
        self.tokens += completion.tokens
        self._loss_mask += [True] * len(completion.tokens)
        self._logprobs += completion.logprobs
        self._versions += completion.versions
        # A turn's request computes the tokens before it again, unless the engine has them in its cache. The pass of an
        # earlier turn counts, because it sampled what followed.
        self._choices = merged(self._choices, completion.choices)
        self._turns.append(range(first, len(self.tokens)))
        self._grammars.append(completion.grammar)
        self._last = completion

    def cut_off(self) -> Completion:
        """Mark the last turn as ended by the length limit, because another turn does not fit, and return it."""
        assert self._last is not None  # another turn follows it
        self._last = self._last._replace(finish_reason="length")
        return self._last

    def add_observation(self, tokens: list[int]) -> None:
        self.tokens += tokens
        self._loss_mask += [False] * len(tokens)
        self._logprobs += [0.0] * len(tokens)
        self._versions += [UNSAMPLED] * len(tokens)

    def branch(self) -> Branch:
        """Return the sequence so far. Raises ValueError if the model has had no turn."""
        lists = [*self.tokens], [*self._loss_mask], [*self._logprobs], [*self._versions], [*self._turns]
        grammars = [*self._grammars] if any(self._grammars) else []
        return Branch(*lists, choices=self._choices, grammars=grammars)

    def scored(
        self,
        text: str,
        reward: float,
        tool_calls: int | None = None,
        components: Mapping[str, float] | None = None,
    ) -> Trajectory:
        """Return the trajectory; the arguments are its fields. Raises ValueError if the model has had no turn."""
        finish_reason = "stop" if self._last is None else self._last.finish_reason
        return Trajectory.of_sequences(
            [self.branch()],
            text,
            reward,
            finish_reason,
            tool_calls=tool_calls,
            components=components,
        )
