"""The token that ends the assistant's messages in a chat template, and a warning where answers do not end there.

Tokenizers of base models often come with the chat template of their instructed sisters and another end token:
Qwen2.5's template writes <|im_end|>, and its base models end at <|endoftext|>.
"""

from __future__ import annotations

from functools import lru_cache

from megatron_rl.model.chat.probes import USER
from megatron_rl.model.tokenizer import Tokenizer

PLACEHOLDER = "\N{OBJECT REPLACEMENT CHARACTER}"


@lru_cache(maxsize=8)
def turn_end(tokenizer: Tokenizer) -> int | None:
    """Return the token that ends a message of the assistant; None if the template writes none, or there is none."""
    try:
        text = tokenizer.conversation(
            [USER, {"role": "assistant", "content": PLACEHOLDER}], add_generation_prompt=False
        )
        behind = tokenizer.encode((text or "").rpartition(PLACEHOLDER)[2])
    except ValueError:
        return None
    return next((token for token in behind if tokenizer.is_special(token)), None)


def unknown_end(tokenizer: Tokenizer, prompt: str | None = None) -> str | None:
    """Say that answers do not end where the chat template ends them; None if they do.

    prompt: one of the run's; no answer to a prompt without the template ends as the template says.
    """
    end = turn_end(tokenizer)
    if end is None or end in tokenizer.end_ids or (prompt is not None and end not in tokenizer.encode(prompt)):
        return None
    name, known = tokenizer.show(end), ", ".join(sorted(map(tokenizer.show, tokenizer.end_ids)))
    return (
        f"the chat template ends a message by {name}, which is not an end token of the tokenizer ({known}): sampled "
        f"answers run on behind it. Set tokenizer.end_tokens: ['{name}'] to end answers and exports there"
    )
