"""Sampling of one call: the run's, within what the request of a program may change."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Literal

from pydantic import ValidationError

from megatron_rl.inference.config import Sampling
from megatron_rl.server.errors import invalid

CHOSEN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "logit_bias": "logit_bias",
    "ignore_eos": "ignore_eos",
}
"""Parameters of a request that have an effect if the program may choose, and our names of them."""


def narrowed(
    run: Sampling,
    asked: Sampling,
    given: Set[str],
    by: Literal["run", "program"],
    *,
    most: int,
    end_ids: Set[int],
) -> Sampling:
    """Return the sampling of a call. Raises ApiError.

    Args:
        asked: sampling that the request asks for.
        given: parameters of `asked` that the request sets itself; the others are defaults.
        by: who chooses, see `EndpointConfig.sampling`.
        most: largest number of tokens of the answer.
        end_ids: tokens that end an answer anyway.
    """
    longest = min(run.max_new_tokens, most)
    kind = type(asked) if by == "program" else Sampling
    chosen = {ours for theirs, ours in CHOSEN.items() if theirs in given} if by == "program" else set[str]()
    values: dict[str, Any] = run.model_dump()
    stop_tokens = [each for each in asked.stop_tokens if each not in end_ids]
    values |= {name: getattr(asked, name) for name in chosen & kind.model_fields.keys()}
    values |= {
        "max_new_tokens": longest,
        "min_new_tokens": min(values["min_new_tokens"], longest),
        "stop": tuple(dict.fromkeys((*run.stop, *asked.stop))),
        "stop_tokens": tuple(dict.fromkeys((*run.stop_tokens, *stop_tokens))),
    }
    try:
        return kind(**values)
    except ValidationError as error:
        raise invalid(error, {"stop_tokens": "stop_token_ids"}) from error
