"""Request and response bodies of servers with OpenAI's API that return token ids. Pure.

mrl     the server of this project
vllm    vLLM: token ids by `return_token_ids`, and further sampling parameters under its own names
sglang  SGLang, by its own API: see sglang_bodies.py

A request names every sampling parameter, neutral ones too: what is left out, a server takes from the
generation_config.json of its model, and would sample from another distribution than it reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.inference.api import Completion, Delta, FinishReason, GenerationRequest, TopLogprobs, Unsupported
from megatron_rl.inference.config import AdjustedSampling, beyond_vllm
from megatron_rl.inference.text import Decode, StopStrings

TOKEN_ID = "token_id:"
"""Prefix of token names, before the id, if tokens are named by their ids."""


class UnusableAnswer(RuntimeError):
    """A server's response is no valid answer to the request."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and its properties. Its token is only referred to."""

    url: str
    """Base URL with the version: http://node:8000/v1"""
    model: str
    kind: Literal["mrl", "vllm", "sglang"]
    token_file: Path | None = None
    """File that contains the bearer token."""
    token_variable: str | None = None
    """Environment variable that contains the bearer token instead."""
    timeout_s: float = 600.0
    """Seconds without a byte from the server. An answer that is not streamed arrives only when it is complete."""
    attempts: int = 6
    """Most attempts of one request while the server is busy or unreachable."""
    processed_logprobs: bool = False
    """Whether vLLM was started with --logprobs-mode processed_logprobs. Its log-probs are then those after the
    temperature; by default (raw_logprobs) those before."""


def check_supported(request: GenerationRequest, endpoint: Endpoint) -> None:
    """Raise Unsupported if a request needs what no server can do."""
    sampling = request.sampling
    if adjusted := isinstance(sampling, AdjustedSampling) and sampling.adjustments:
        raise Unsupported(f"sampling.{adjusted[0]}: requests to another server do not support it")
    if request.known:
        raise Unsupported(f"known: a server ({endpoint.kind}) cannot resume an answer with its own random numbers")


def body(request: GenerationRequest, endpoint: Endpoint) -> dict[str, Any]:
    """Return the request for /completions. Raises Unsupported if the endpoint cannot do what it needs."""
    check_supported(request, endpoint)
    sampling, kind = request.sampling, endpoint.kind
    asked: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": request.prompt_tokens,
        "n": samples_of(request, endpoint),
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.key - 2**64 if kind != "mrl" and request.key >= 2**63 else request.key,
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if kind == "vllm" and (against := beyond_vllm(sampling, processed_logprobs=endpoint.processed_logprobs)):
        raise Unsupported(against)
    return asked | {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_new_tokens,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def samples_of(request: GenerationRequest, endpoint: Endpoint) -> int:
    """Number of answers to ask for. vLLM refuses several greedy ones to a prompt, of which one stands for all."""
    return 1 if endpoint.kind == "vllm" and request.sampling.temperature == 0 else request.num_samples


def scoring_body(tokens: Sequence[int], endpoint: Endpoint) -> dict[str, Any]:
    """Return the request for the log-probs of a text, at temperature 1. It also samples a token."""
    return {
        "model": endpoint.model,
        "prompt": [*tokens],
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "return_token_ids": True,
    }


def scoring_answer(tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """Return the part of a response to `scoring_body` that `scores` reads.

    logprobs: of each token after the first.
    """
    scored = [{str(token): {"logprob": logprob}} for token, logprob in zip(tokens[1:], logprobs, strict=True)]
    return {"choices": [{"index": 0, "prompt_logprobs": [None, *scored]}]}


def scores(answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Parse the response to `scoring_body`: the log-prob of each token after the first. Raises UnusableAnswer."""
    try:
        (choice,) = answer["choices"]
        given = choice["prompt_logprobs"]
        return [float(at[str(token)]["logprob"]) for at, token in zip(given[1:], tokens[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableAnswer(f"the log-probs of a prompt are missing: {error!r}") from error


def delta(choice: Mapping[str, Any], request: GenerationRequest, version: int) -> Delta:
    """Parse one choice of a response, or of a chunk, from a server that returns token ids.

    version: policy version of tokens for which the server does not report one.

    Raises UnusableAnswer.
    """
    try:
        tokens, index = [int(token) for token in choice["token_ids"] or ()], int(choice["index"])
        given = choice.get("logprobs") or {}
        logprobs = [float(value) for value in given.get("token_logprobs", ())]
        versions = [int(each) for each in choice.get("policy_versions") or [version] * len(tokens)]
        top = [_by_id(each) for each in given.get("top_logprobs") or ()] if request.top_logprobs else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableAnswer(
            f"a choice has no token ids or log-probs, which the request asked for: {error!r}"
        ) from error
    if not 0 <= index < request.num_samples:
        raise UnusableAnswer(f"the answer has a choice {index}, but the request asked for {request.num_samples}")
    for name, found in ("log-probs", logprobs), ("policy versions", versions), ("top log-probs", top):
        if found is not None and len(found) != len(tokens):
            raise UnusableAnswer(f"a choice has {len(tokens)} tokens and {len(found)} {name}")
    if top is not None:
        top = [dict(sorted(each.items(), key=lambda item: -item[1])[: request.top_logprobs]) for each in top]
    reason = choice.get("stop_reason")
    return Delta(
        index,
        tokens,
        logprobs,
        versions,
        top,
        finish_reason(choice),
        reason if isinstance(reason, str) else None,
    )


def deltas(choice: Mapping[str, Any], request: GenerationRequest, endpoint: Endpoint, version: int) -> list[Delta]:
    """Parse one choice as a part of each answer that it stands for. Raises UnusableAnswer."""
    if samples_of(request, endpoint) == request.num_samples:
        return [delta(choice, request, version)]
    return [delta({**choice, "index": sample}, request, version) for sample in range(request.num_samples)]


def _by_id(named: Mapping[str, float]) -> TopLogprobs:
    return {int(name.removeprefix(TOKEN_ID)): float(value) for name, value in named.items()}


def finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    """Return why a choice has ended; None if it has not. Raises UnusableAnswer if the server gave it up."""
    found = choice.get("finish_reason")
    if found == "stop":
        return "stop"
    if found == "length":
        return "length"
    if found is None:
        return None
    raise UnusableAnswer(f"the server gave up an answer: finish_reason {found!r}")


def completion(found: Delta, request: GenerationRequest, decode: Decode | None) -> Completion:
    """Return a complete choice as a completion. decode: finds the stop string if the server does not name it.

    Raises UnusableAnswer.
    """
    if found.finish_reason is None or not found.tokens:
        raise UnusableAnswer(f"choice {found.sample} is incomplete")
    stop = found.stop
    if stop is None and decode is not None and found.finish_reason == "stop" and request.sampling.stop:
        seen = StopStrings(request.sampling.stop, decode).push(found.tokens)
        stop = seen[1] if seen else None
    return Completion(found.tokens, found.logprobs, found.finish_reason, found.versions, stop, found.top_logprobs)
