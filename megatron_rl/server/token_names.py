"""Names of tokens in log-probs, and the offset of each token in the text."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import cache

from megatron_rl.inference.api import TopLogprobs
from megatron_rl.model.tokenizer import Tokenizer


class TokenNames:
    """Names of tokens: as they read in the middle of a text, or by their ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._show = _id_name if as_ids else cache(tokenizer.show)
        self.bytes = cache(tokenizer.token_bytes)

    def name(self, token: int) -> str:
        return self._show(token)

    def by_name(self, likeliest: TopLogprobs, own: int, logprob: float) -> dict[str, float]:
        """Return the likeliest tokens of a position and the sampled one by name, the likeliest first. If tokens share a
        name, as a special token and its letters may, the sampled one keeps it and others are named by their ids."""
        tokens = likeliest if own in likeliest else likeliest | {own: logprob}
        named: dict[str, float] = {}
        for token, value in tokens.items():
            name = self._show(token)
            taken = name in named or (token != own and name == self._show(own))
            named[_id_name(token) if taken else name] = logprob if token == own else value
        return named


def _id_name(token: int) -> str:
    return f"token_id:{token}"  # as vLLM names it


class TextOffsets:
    """Number of characters of a text before each of its tokens, computed as tokens come."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        """special: whether the text includes the names of special tokens."""
        self._tokenizer, self._special = tokenizer, special
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def prompt(self, tokens: Iterable[int], text: str) -> list[int]:
        offsets = self.next(tokens)
        beyond = self._at - len(text)  # SentencePiece decodes a leading space that the text does not have
        self._at = len(text)
        return [max(0, offset - beyond) for offset in offsets] if beyond > 0 else offsets

    def next(self, tokens: Iterable[int]) -> list[int]:
        """Return the offsets of the next tokens. Part of a character has the offset of the character."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            if self._special or not self._tokenizer.is_special(token):
                self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offsets
