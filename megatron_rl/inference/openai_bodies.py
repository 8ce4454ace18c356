"""What is asked of an OpenAI-compatible server, and what its answers mean. Pure.

mrl     the server of this project
vllm    vLLM: token ids by `return_token_ids`, further sampling parameters by the names it has for them
openai  what OpenAI's own API has, and no more: it tells no token ids
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_rl.inference.api import Completion, Delta, FinishReason, GenerationRequest, TopLogprobs, Unsupported
from megatron_rl.inference.config import AdjustedSampling, beyond_vllm
from megatron_rl.inference.text import Decode, StopStrings

MOST_STOPS_OF_OPENAI = 4
TOKEN_ID = "token_id:"
"""Before the number, in names of tokens that were asked for by their ids."""


class UnusableAnswer(RuntimeError):
    """A server answered what is no answer to what it was asked."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server and what is known of it. Its token is only named here."""

    url: str
    """With the version: http://node:8000/v1"""
    model: str
    kind: Literal["mrl", "vllm", "openai"]
    token_file: Path | None = None
    """Holds the bearer token ..."""
    token_variable: str | None = None
    """... or the name of an environment variable that does."""
    timeout_s: float = 600.0
    """Longest silence of the server; it says nothing of an answer that is not streamed until it is whole."""
    attempts: int = 6
    """How often one request is sent at most, where the server is busy or gone."""
    processed_logprobs: bool = False
    """Of vLLM: whether it was started with --logprobs-mode processed_logprobs. Its log-probs are then those after the
    temperature, without it (raw_logprobs) those before."""


def body(request: GenerationRequest, endpoint: Endpoint) -> dict[str, Any]:
    """The request for /completions. Raises Unsupported where the endpoint cannot do what it asks for."""
    sampling, kind = request.sampling, endpoint.kind
    if adjusted := isinstance(sampling, AdjustedSampling) and sampling.adjustments:
        raise Unsupported(f"sampling.{adjusted[0]}: nothing here asks a server for it")
    if request.known:
        raise Unsupported(f"known: a server ({kind}) cannot go on with an interrupted answer's own random numbers")
    asked: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": request.prompt_tokens,
        "n": request.num_samples,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": request.key - 2**64 if kind != "mrl" and request.key >= 2**63 else request.key,
    }
    if sampling.stop:
        asked["stop"] = list(sampling.stop)
    if kind == "openai":
        _check_openai(request)
        return asked
    if kind == "vllm":
        _check_vllm_logprobs(request, endpoint)
    return asked | {
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "min_tokens": sampling.min_new_tokens,
        "stop_token_ids": list(sampling.stop_tokens),
        "logprobs": request.top_logprobs,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _check_openai(request: GenerationRequest) -> None:
    sampling = request.sampling
    for name, asked in (
        ("sampling.top_k", sampling.top_k > 0),
        ("sampling.min_p", sampling.min_p > 0),
        ("sampling.min_new_tokens", sampling.min_new_tokens > 0),
        ("sampling.stop_tokens", bool(sampling.stop_tokens)),
        ("top_logprobs", request.top_logprobs > 0),
    ):
        if asked:
            raise Unsupported(f"{name}: a plain OpenAI endpoint has nothing of the kind")
    if len(sampling.stop) > MOST_STOPS_OF_OPENAI:
        raise Unsupported(f"sampling.stop: a plain OpenAI endpoint takes {MOST_STOPS_OF_OPENAI} strings at most")


def _check_vllm_logprobs(request: GenerationRequest, endpoint: Endpoint) -> None:
    if against := beyond_vllm(request.sampling, processed_logprobs=endpoint.processed_logprobs):
        raise Unsupported(against)


def delta(choice: Mapping[str, Any], request: GenerationRequest, version: int) -> Delta:
    """One choice of an answer, or of a part of one, of a server that tells token ids.

    version: of the policy, where the server does not say it of each token.

    Raises UnusableAnswer.
    """
    try:
        tokens, index = [int(token) for token in choice["token_ids"] or ()], int(choice["index"])
        told = choice.get("logprobs") or {}
        logprobs = [float(value) for value in told.get("token_logprobs", ())]
        versions = [int(each) for each in choice.get("policy_versions") or [version] * len(tokens)]
        top = [_by_id(each) for each in told.get("top_logprobs") or ()] if request.top_logprobs else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableAnswer(
            f"token ids and log-probs were asked for, and a choice comes without: {error!r}"
        ) from error
    if not 0 <= index < request.num_samples:
        raise UnusableAnswer(f"the answer has a choice {index} where {request.num_samples} were asked for")
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


def _by_id(named: Mapping[str, float]) -> TopLogprobs:
    return {int(name.removeprefix(TOKEN_ID)): float(value) for name, value in named.items()}


def finish_reason(choice: Mapping[str, Any]) -> FinishReason | None:
    """Why a choice has ended; None where it goes on. Raises UnusableAnswer where it was given up."""
    found = choice.get("finish_reason")
    if found == "stop":
        return "stop"
    if found == "length":
        return "length"
    if found is None:
        return None
    raise UnusableAnswer(f"the server gave an answer up: finish_reason {found!r}")


def completion(found: Delta, request: GenerationRequest, decode: Decode | None) -> Completion:
    """A choice of a whole answer. decode: to say which stop string it was, where the server does not.

    Raises UnusableAnswer.
    """
    if found.finish_reason is None or not found.tokens:
        raise UnusableAnswer(f"choice {found.sample} is not whole")
    stop = found.stop
    if stop is None and decode is not None and found.finish_reason == "stop" and request.sampling.stop:
        seen = StopStrings(request.sampling.stop, decode).push(found.tokens)
        stop = seen[1] if seen else None
    return Completion(found.tokens, found.logprobs, found.finish_reason, found.versions, stop, found.top_logprobs)
