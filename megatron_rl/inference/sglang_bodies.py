"""Request and response bodies of SGLang's /generate. Pure.

SGLang's log-probs are those of softmax(logits / temperature) over all tokens, before top_k, top_p and min_p, unless it
runs with SGLANG_RETURN_ORIGINAL_LOGPROB. Those of a prompt are of temperature 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.inference.api import Delta, FinishReason, GenerationRequest, Unsupported
from megatron_rl.inference.config import beyond_sglang
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer, check_supported


def body(request: GenerationRequest, endpoint: Endpoint) -> dict[str, Any]:
    """Return the request. Raises Unsupported if SGLang cannot do what it needs."""
    check_supported(request, endpoint)
    sampling = request.sampling
    if (name := beyond_sglang(sampling)) is not None or (name := "top_logprobs" if request.top_logprobs else None):
        raise Unsupported(f"{name}: requests to SGLang do not support it")
    return {
        "input_ids": [*request.prompt_tokens],
        "return_logprob": True,
        "sampling_params": {
            "n": request.num_samples,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "min_new_tokens": 0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": [*sampling.stop],
            "stop_token_ids": [*sampling.stop_tokens],
            "no_stop_trim": True,
        },
    }


def delta(choice: Mapping[str, Any], sample: int, version: int) -> Delta:
    """Parse one answer. Raises UnusableAnswer.

    version: policy version of its tokens.
    """
    try:
        meta = choice["meta_info"]
        found = [(int(token), float(logprob)) for logprob, token, *_ in meta["output_token_logprobs"]]
        reason = meta["finish_reason"]
        kind, matched = reason["type"], reason.get("matched")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnusableAnswer(f"an answer has no log-probs, which the request asked for: {error!r}") from error
    if kind not in ("stop", "length"):
        raise UnusableAnswer(f"the server gave up an answer: finish_reason {reason!r}")
    ended: FinishReason = "stop" if kind == "stop" else "length"
    tokens, logprobs = [token for token, _ in found], [logprob for _, logprob in found]
    stop = matched if isinstance(matched, str) else None
    return Delta(sample, tokens, logprobs, [version] * len(tokens), None, ended, stop)


def scoring_body(tokens: Sequence[int]) -> dict[str, Any]:
    """Return the request for the log-probs of a text, at temperature 1. It also samples a token."""
    return {
        "input_ids": [*tokens],
        "return_logprob": True,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }


def scores(answer: Any, tokens: Sequence[int]) -> list[float]:
    """Parse the response to `scoring_body`: the log-prob of each token after the first. Raises UnusableAnswer."""
    try:
        found = [(token, logprob) for logprob, token, *_ in answer["meta_info"]["input_token_logprobs"]]
        if [token for token, _ in found] != [*tokens]:
            raise ValueError(f"they are of {len(found)} other tokens")
        return [float(logprob) for _, logprob in found[1:]]
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableAnswer(f"the log-probs of a prompt are missing: {error!r}") from error
