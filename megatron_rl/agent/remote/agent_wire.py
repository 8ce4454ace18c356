"""Protocol between the ranks and an agent in another process: JSON over HTTP. Pure.

    GET    /about                             the agent, its protocol, prompts and worked answers
    POST   /rollouts            {"request"}   {"session"}: the agent begins to answer a problem
    POST   /sessions/ID/poll    {"known"}     "asks": generation requests other than `known`, which are in progress, and
                                              the "withdrawn" ones of `known`; or "result"; or "error"
    POST   /sessions/ID/answers {"answers"}   completions by the ids of their requests
    DELETE /sessions/ID                       the caller no longer waits

The ranks send all requests, even for generation, so the ranks need not be reachable. Problems stay with the agent and
are named by set and index; the ranks know only the prompts. A log-prob that is not finite is null. Each request carries
the token. Each body that begins a session carries PROTOCOL and the digest of the prompts: an agent with other problems
rejects it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, NonNegativeInt, Strict, TypeAdapter

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits
from megatron_rl.agent.trajectories import Branch, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.interface import Completion, FinishReason
from megatron_rl.generate.replicas.wire import (
    MOST_SAMPLES,
    STRICT,
    Garbled,
    PolicyVersion,
    Refusal,
    TokenId,
    decode_logprobs,
    encode_logprobs,
    kind_of,
)
from megatron_rl.model.choices import decode_choices, encode_choices
from megatron_rl.recipe.inference import Sampling

PROTOCOL = 9
TRAINING = "training"
"""Name of the training set; the others are evaluation/NAME."""
EVALUATION = "evaluation/"
POLL_S = 5.0
"""Seconds that a poll waits for something to report."""
LISTS = ("tokens", "loss_mask", "versions")


class AgentDescription(BaseModel):
    protocol: int
    environment: str
    prompt_format: str
    compares_answers: bool
    sets: dict[str, list[str]]
    demonstrations: list[tuple[str, str]]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.sets, sort_keys=True).encode()).hexdigest()


class AgentRequest(BaseModel):
    set: str
    number: NonNegativeInt
    samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
    sampling: Sampling
    key: int
    ordinal: int | None
    """Position in the prompt stream; None in an evaluation."""
    limits: RolloutLimits


class AgentAnswers(NamedTuple):
    """Fields of a TrajectoryGroup."""

    trajectories: list[Trajectory]
    failures: Mapping[str, int]
    final_answers: Sequence[str | None]


class _AgentBody(BaseModel):
    model_config = STRICT


class _Sequence(_AgentBody):
    tokens: list[NonNegativeInt]
    loss_mask: list[bool]
    logprobs: list[float | None]
    versions: list[int]
    turns: list[Annotated[tuple[int, int], Strict(False)]]
    choices: list[Any] = []
    """Form of `encode_choices`; empty if there are none."""
    grammars: list[str] = []

    def branch(self, vocab_size: int) -> Branch:
        if max(self.tokens, default=0) >= vocab_size:
            raise ValueError("a token outside the vocabulary")
        if not all(0 <= start <= stop <= len(self.tokens) for start, stop in self.turns):
            raise ValueError("a turn outside the tokens")
        turns = [range(*turn) for turn in self.turns]
        choices = decode_choices(self.choices) if self.choices else []
        lists = self.tokens, self.loss_mask, decode_logprobs(self.logprobs), self.versions, turns
        return Branch(*lists, choices=choices, grammars=self.grammars)


class _Answer(_AgentBody):
    sequences: list[_Sequence]
    text: str
    reward: float
    finish_reason: FinishReason
    tool_calls: int | None
    components: dict[str, float]
    output: str
    turn_scores: list[TurnScore] = []

    def trajectory(self, vocab_size: int) -> Trajectory:
        made = Trajectory.of_sequences(
            [each.branch(vocab_size) for each in self.sequences],
            self.text,
            self.reward,
            self.finish_reason,
            tool_calls=self.tool_calls,
            components=CheckedReward.of({**self.components, "reward": self.reward}).components,
            output=self.output,
        )
        return made.with_turn_scores(tuple(self.turn_scores))


class _Result(_AgentBody):
    answers: list[_Answer]
    failures: dict[str, int]
    final_answers: list[str | None]


def encode_completions(completions: Sequence[Completion]) -> list[list[Any]]:
    return [
        [one.tokens, encode_logprobs(one.logprobs), one.finish_reason, one.versions, one.stop]
        + ([encode_choices(one.choices), one.grammar] if one.choices or one.grammar else [])
        for one in completions
    ]


class _Completed(NamedTuple):
    tokens: list[TokenId]
    logprobs: list[float | None]
    finish_reason: FinishReason
    versions: list[PolicyVersion]
    stop: str | None
    choices: list[Any] = []  # few have them, and a grammar
    grammar: str = ""

    @property
    def completion(self) -> Completion:
        lists = self.tokens, decode_logprobs(self.logprobs), self.finish_reason, self.versions, self.stop
        return Completion(*lists, choices=decode_choices(self.choices) if self.choices else [], grammar=self.grammar)


_COMPLETIONS = TypeAdapter(list[_Completed], config=STRICT)


def decode_completions(body: Any) -> list[Completion]:
    """Raises Garbled."""
    try:
        return [each.completion for each in _COMPLETIONS.validate_python(body)]
    except ValueError as error:
        raise Garbled(f"completions: {error}"[:300]) from error


def encode_refusal(error: Exception) -> dict[str, str]:
    return {"kind": kind_of(error), "message": str(error)}


def decode_refusal(body: Mapping[str, Any]) -> Exception:
    return Refusal("", str(body["kind"]), str(body["message"])).error


def encode_result(result: TrajectoryGroup) -> dict[str, Any]:
    answers = [
        {
            "sequences": [_encode_sequence(each) for each in one.sequences],
            "components": dict(one.components),
            **({"turn_scores": one.turn_scores} if one.turn_scores else {}),
            **{name: getattr(one, name) for name in ("text", "reward", "finish_reason", "tool_calls", "output")},
        }
        for one in result.trajectories
    ]
    return {"answers": answers, "failures": dict(result.failures), "final_answers": [*result.final_answers]}


def _encode_sequence(one: Branch) -> dict[str, Any]:
    choices = {"choices": encode_choices(one.choices)} if one.choices else {}
    turns = [(turn.start, turn.stop) for turn in one.turns]
    grammars = {"grammars": one.grammars} if one.grammars else {}
    lists = {name: getattr(one, name) for name in LISTS} | {"logprobs": encode_logprobs(one.logprobs)}
    return lists | {"turns": turns} | choices | grammars


def decode_result(body: Any, vocab_size: int) -> AgentAnswers:
    """Decode a result. Raises Garbled, also for trajectories that no model can be trained on."""
    try:
        result = _Result.model_validate(body)
        trajectories = [one.trajectory(vocab_size) for one in result.answers]
        if result.final_answers and len(result.final_answers) != len(trajectories):
            raise ValueError("not one final answer per answer")
    except ValueError as error:
        raise Garbled(f"a result: {error!r}"[:300]) from error
    return AgentAnswers(trajectories, result.failures, result.final_answers)
