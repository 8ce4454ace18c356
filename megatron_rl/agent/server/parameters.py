"""Parameters of OpenAI's and vLLM's requests on which this server does not act. The fields of bodies.py are those on
which it does; docs/inference.md lists all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT_EFFECT = frozenset(
    "metadata mm_payload prompt_cache_key prompt_cache_options prompt_cache_retention request_id return_mm_kwargs "  # noqa: SIM905
    "return_token_offsets routed_experts_prompt_start safety_identifier session_id spaces_between_special_tokens "
    "stream_interval truncation_side user".split()
)
"""Accepted with any value, since they change no answer. Others are refused, since ignoring them would change it."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "include_reasoning": (True,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "thinking_token_budget": (-1,),
    "verbosity": ("medium",),
}
"""Values that ask for nothing."""
REFUSED = frozenset(
    "allowed_token_ids audio bad_words cache_salt chat_template continue_final_message documents "  # noqa: SIM905
    "ec_transfer_params echo functions guided_choice guided_decoding_backend guided_grammar guided_json "
    "guided_regex kv_transfer_params logprob_token_ids media_io_kwargs mm_processor_kwargs moderation "
    "prediction prompt_embeds prompt_logprobs repetition_detection return_prompt_text "
    "return_tokens_as_token_ids store structured_outputs suffix truncate_prompt_tokens use_beam_search "
    "vllm_xargs watermarking web_search_options".split()
)
"""Refused unless false or empty. Names that neither API has are refused with any value: a misspelt
`add_special_token: false` would otherwise change nothing, in silence."""

_FORCED = "is not supported here; ask /v1/chat/completions with response_format"
ADVICE = {
    "best_of": "is not supported here; ask for n answers",
    "chat_template": "is not accepted from a client, since it is a program. The model's own is used",
    "continue_final_message": "is not supported here; ask /v1/completions, or give prompt_token_ids",
    "echo": "is for /v1/completions; leave it out",
    "function_call": "is not supported here; use tools",
    "functions": "is not supported here; use tools",
    "prompt_logprobs": "is for /v1/completions; leave it out",
    "prompt_embeds": "is not supported here; give a text or token ids",
    "thinking_token_budget": "is not supported here; max_tokens ends an answer",
    "truncate_prompt_tokens": "is not supported here; shorten the prompt",
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "response_format"), _FORCED),
    "structured_outputs": _FORCED,
}


def asks_nothing(name: str, value: Any, request: Mapping[str, Any]) -> bool:
    """Whether leaving out a parameter that is not a field of a body changes no answer."""
    if value is None or name in WITHOUT_EFFECT:
        return True
    if name in NEUTRAL:
        return value in NEUTRAL[name] or (name == "best_of" and value == request.get("n"))
    return name in REFUSED and (value is False or value in ([], {}, ""))
