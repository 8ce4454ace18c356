"""Parameters of OpenAI's and vLLM's requests on which this server does not act. The fields of bodies.py are those on
which it does; docs/inference.md lists all of them."""

from __future__ import annotations

from typing import Any, NamedTuple

WITHOUT_EFFECT = {
    "metadata": "the client's own notes",
    "mm_payload": "no image is ever sent back",
    "prompt_cache_key": "common prefixes are found without it",
    "prompt_cache_options": "common prefixes are found without it",
    "prompt_cache_retention": "common prefixes are found without it",
    "request_id": "the server names answers itself",
    "return_mm_kwargs": "no image is ever sent back",
    "return_token_offsets": "vLLM ignores it on these routes too",
    "routed_experts_prompt_start": "routing decisions are not returned",
    "safety_identifier": "the requests of every token are answered alike",
    "session_id": "requests of a session are answered like others",
    "spaces_between_special_tokens": "current tokenizers add none",
    "stream_interval": "a chunk contains all tokens that are available",
    "truncation_side": "no prompt is truncated",
    "user": "the requests of every token are answered alike",
}
"""Accepted with any value, since they change no answer. Name -> reason."""

_FORCED = (
    "answers cannot be forced into a grammar or a schema. Leave it out and ask for the format in the prompt, or serve "
    "the weights with vLLM"
)
_TEXT_ONLY = "the model reads and writes text only; leave it out"


class Unless(NamedTuple):
    """A parameter that is refused unless its value asks for nothing."""

    neutral: tuple[Any, ...]
    """Values that ask for nothing, and so are accepted."""
    why: str = "is not supported here; leave it out"


REFUSED = {
    "add_generation_prompt": Unless((True,), "other than true is not supported here: the assistant speaks next"),
    "allowed_token_ids": Unless(([],)),
    "audio": Unless((), f"is not supported here: {_TEXT_ONLY}"),
    "bad_words": Unless(([],)),
    "best_of": Unless((1,), "is not supported here; ask for n answers"),
    "cache_salt": Unless((), "is not supported here: requests share common prefixes"),
    "chat_template": Unless((), "is not accepted from a client, since it is a program. The model's own is used"),
    "continue_final_message": Unless((False,), "is not supported here; ask /v1/completions, or give prompt_token_ids"),
    "documents": Unless(([],)),
    "ec_transfer_params": Unless(({},)),
    "echo": Unless((False,), "is for /v1/completions; leave it out"),
    "function_call": Unless(("none", "auto"), "is not supported here; use tools"),
    "functions": Unless(([],), "is not supported here; use tools"),
    "guided_choice": Unless((), f"is not supported here: {_FORCED}"),
    "guided_decoding_backend": Unless((), f"is not supported here: {_FORCED}"),
    "guided_grammar": Unless((), f"is not supported here: {_FORCED}"),
    "guided_json": Unless((), f"is not supported here: {_FORCED}"),
    "guided_regex": Unless((), f"is not supported here: {_FORCED}"),
    "include_reasoning": Unless((True,), "is for /v1/chat/completions; leave it out"),
    "kv_transfer_params": Unless(({},)),
    "length_penalty": Unless((1,), "is for beam search, which is not supported here; leave it out"),
    "logprob_token_ids": Unless(([],), "is not supported here; ask for the likeliest tokens"),
    "media_io_kwargs": Unless(({},), f"is not supported here: {_TEXT_ONLY}"),
    "mm_processor_kwargs": Unless(({},), f"is not supported here: {_TEXT_ONLY}"),
    "modalities": Unless((["text"],), f"is not supported here: {_TEXT_ONLY}"),
    "moderation": Unless(()),
    "prediction": Unless(()),
    "priority": Unless((0,), "is not supported here: requests are answered in order of arrival"),
    "prompt_embeds": Unless((), "is not supported here; give a text or token ids"),
    "repetition_detection": Unless(()),
    "response_format": Unless(({"type": "text"},), f"other than text is not supported here: {_FORCED}"),
    "return_prompt_text": Unless((False,), "is not supported here; ask for return_token_ids"),
    "service_tier": Unless(("auto", "default")),
    "store": Unless((False,), "is not supported here: nothing is stored"),
    "structured_outputs": Unless((), f"is not supported here: {_FORCED}"),
    "suffix": Unless(("",)),
    "thinking_token_budget": Unless((-1,), "is not supported here; max_tokens ends an answer"),
    "truncate_prompt_tokens": Unless((), "is not supported here; shorten the prompt"),
    "use_beam_search": Unless((False,)),
    "verbosity": Unless(("medium",)),
    "vllm_xargs": Unless(({},)),
    "watermarking": Unless((False,)),
    "web_search_options": Unless(()),
}
"""Refused by name unless the value asks for nothing, since ignoring them would change the answer."""
