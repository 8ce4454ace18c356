"""Texts of the tokens of a sequence, which together are its text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cache

from megatron_rl.model.tokenizer import Tokenizer


class Pieces:
    """Splits sequences into the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = cache(tokenizer.token_bytes)

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token; special tokens have their names. A character that several tokens share is
        with the last of them; bytes that are no character become U+FFFD."""
        decoder = getincrementaldecoder("utf-8")("replace")
        last = len(tokens) - 1
        return [decoder.decode(self._bytes(token), final=place == last) for place, token in enumerate(tokens)]
