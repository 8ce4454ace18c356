"""Protocol between the ranks and an agent in another process: JSON over HTTP. Pure.

    GET    /about                             the agent, its sets and its protocol
    GET    /problems?set=training&first=0     a page of a set's prompts, in their order
    GET    /demonstrations?first=0            a page of its worked answers, if it has any
    POST   /grouped_rollouts     {"request"}  {"session"}: the agent begins to answer a problem
    POST   /contrastive_rollouts {"request"}  likewise; the result is a better and a worse answer
    POST   /rollouts             {"request"}  likewise, several problems, each once
    POST   /evaluation           {"request"}  likewise, several problems
    POST   /sessions/ID/poll  {"known"}       "asks": generation requests other than `known`, which are in progress, and
                                              the "withdrawn" ones of `known`; or "result"; or "error"
    POST   /sessions/ID/answers {"answers"}   completions by the ids of their requests
    DELETE /sessions/ID                       the caller no longer waits

The ranks send all requests, even for generation, so the ranks need not be reachable. Problems stay with the agent and
are named by set and index; the ranks know only the prompts. Each request carries the token. Each body that begins a
session carries PROTOCOL and the digest of the problems: an agent with other problems rejects it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from megatron_rl.agent.api import EvaluationResponse
from megatron_rl.agent.scoring import CheckedReward, RolloutLimits
from megatron_rl.agent.trajectories import Branch, Problem, Trajectory
from megatron_rl.generate.engine.api import Completion
from megatron_rl.generate.replicas.wire import Garbled, Refusal, kind_of
from megatron_rl.recipe.inference import Sampling

PROTOCOL = 5
TRAINING = "training"
"""Name of the training set; the others are evaluation/NAME."""
EVALUATION = "evaluation/"
PAGE = 1000
POLL_S = 5.0
"""Seconds that a poll waits for something to report."""

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class AgentDescription:
    protocol: int
    environment: str
    digest: str
    sets: Mapping[str, int]
    prompt_format: str
    demonstrations: int
    compares_answers: bool


class ProblemId(NamedTuple):
    set: str
    number: int


@dataclass(frozen=True, slots=True)
class AgentRequest:
    problems: list[ProblemId]
    """Problems to answer; exactly one for a group or a pair."""
    samples: int
    sampling: Sampling
    key: int
    ordinal: int | None
    """Position in the prompt stream; None outside it."""
    limits: RolloutLimits


def digest_of(sets: Mapping[str, Sequence[Problem]]) -> str:
    prompts = {name: [problem.prompt for problem in problems] for name, problems in sets.items()}
    return hashlib.sha256(json.dumps(prompts, sort_keys=True).encode()).hexdigest()


def decode_about(body: Body) -> AgentDescription:
    try:
        about = AgentDescription(**body)
        if not all(isinstance(count, int) and count >= 0 for count in about.sets.values()):
            raise TypeError("sets")
    except (TypeError, AttributeError) as error:
        raise Garbled(f"about: {error}") from error
    return about


def encode_agent_request(request: AgentRequest) -> dict[str, Any]:
    return {**asdict(request), "sampling": request.sampling.model_dump()}


def decode_agent_request(body: Body) -> AgentRequest:
    try:
        problems = [ProblemId(str(name), int(number)) for name, number in body["problems"]]
        sampling, limits = Sampling.model_validate(body["sampling"]), RolloutLimits(**body["limits"])
        return AgentRequest(**{**body, "problems": problems, "sampling": sampling, "limits": limits})
    except (KeyError, TypeError, ValueError) as error:
        raise Garbled(f"a request: {error!r}") from error


def encode_completions(completions: Sequence[Completion]) -> list[list[Any]]:
    return [[one.tokens, one.logprobs, one.finish_reason, one.versions, one.stop] for one in completions]


def decode_completions(body: Any) -> list[Completion]:
    try:
        return [Completion(*each) for each in body]
    except TypeError as error:
        raise Garbled(f"completions: {error}") from error


def encode_refusal(error: Exception) -> dict[str, str]:
    return {"kind": kind_of(error), "message": str(error)}


def decode_refusal(body: Body) -> Exception:
    return Refusal("", body["kind"], body["message"]).error


def encode_response(response: EvaluationResponse) -> dict[str, Any]:
    groups = [[_encode_trajectory(one) for one in group] for group in response.trajectories]
    finals = [[place, its] for place, its in response.final_answers.items()]
    return {"trajectories": groups, "failures": dict(response.failures), "final_answers": finals}


def decode_response(body: Body, vocab_size: int) -> EvaluationResponse:
    """Decode a result. Raises Garbled, also for trajectories that no model can be trained on."""
    try:
        groups = [[_decode_trajectory(one, vocab_size) for one in group] for group in body["trajectories"]]
        failures = {str(reason): int(count) for reason, count in body["failures"].items()}
        finals = {int(place): _final_answers(its, len(groups[place])) for place, its in body["final_answers"]}
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Garbled(f"a result: {error!r}"[:300]) from error
    return EvaluationResponse(groups, failures, finals)


def _final_answers(body: Any, answers: int) -> list[str | None]:
    if len(body) != answers or not all(one is None or isinstance(one, str) for one in body):
        raise ValueError("final answers that are not strings, or not one per answer")
    return [*body]


def _encode_trajectory(one: Trajectory) -> dict[str, Any]:
    return {
        "sequences": [_encode_sequence(sequence) for sequence in one.sequences],
        "text": one.text,
        "reward": one.reward,
        "finish_reason": one.finish_reason,
        "tool_calls": one.tool_calls,
        "components": dict(one.components),
        "output": one.output,
    }


def _encode_sequence(one: Branch) -> list[Any]:
    return [one.tokens, one.loss_mask, one.logprobs, one.versions, [[turn.start, turn.stop] for turn in one.turns]]


def _decode_trajectory(body: Any, vocab_size: int) -> Trajectory:
    text, output = body["text"], body["output"]
    finish_reason, tool_calls = body["finish_reason"], body["tool_calls"]
    if finish_reason not in ("stop", "length") or not isinstance(text, str):
        raise ValueError("no text, or no finish reason")
    if not isinstance(output, str):
        raise ValueError("an output that is not text")
    if tool_calls is not None and type(tool_calls) is not int:
        raise ValueError("a number of tool calls that is not an integer")
    reward = float(body["reward"])
    return Trajectory.of_sequences(
        [_decode_sequence(each, vocab_size) for each in body["sequences"]],
        text,
        reward,
        finish_reason,
        tool_calls=tool_calls,
        components=CheckedReward.of({**body["components"], "reward": reward}).components,
        output=output,
    )


def _decode_sequence(body: Any, vocab_size: int) -> Branch:
    tokens, loss_mask, logprobs, versions, turns = body
    if not (_all_are(int, tokens) and _all_are(int, versions) and _all_are(bool, loss_mask)):
        raise ValueError("tokens, versions or loss mask of a wrong type")
    if not all(0 <= token < vocab_size for token in tokens):
        raise ValueError("a token outside the vocabulary")
    if not (_all_are(float, logprobs) and all(map(math.isfinite, logprobs))):
        raise ValueError("a log-prob that is not a finite number")
    spans = [range(start, stop) for start, stop in turns]
    if not all(0 <= span.start <= span.stop <= len(tokens) for span in spans):
        raise ValueError("a turn outside the tokens")
    return Branch(tokens, loss_mask, logprobs, versions, spans)


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)
