"""How log-probs name tokens, and where the text of each begins."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterable
from functools import cache

from megatron_rl.inference.api import TopLogprobs
from megatron_rl.model.tokenizer import Tokenizer


class TokenNames:
    """Names of tokens as they read in the middle of a text, or of their ids."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._show = _id_name if as_ids else cache(tokenizer.show)
        self.bytes = cache(tokenizer.token_bytes)

    def name(self, token: int) -> str:
        return self._show(token)

    def by_name(self, place: TopLogprobs, own: int, logprob: float) -> dict[str, float]:
        """The likeliest tokens of a place and its own one, the likeliest first. A name stands for one token: the own
        one has its name, and others of that name, such as the letters of a special token, are named by their ids."""
        tokens = place if own in place else place | {own: logprob}
        named: dict[str, float] = {}
        for token, value in tokens.items():
            name = self._show(token)
            taken = name in named or (token != own and name == self._show(own))
            named[_id_name(token) if taken else name] = logprob if token == own else value
        return named


def _id_name(token: int) -> str:
    return f"token_id:{token}"  # vLLM's name for it


class TextOffsets:
    """Characters of a text before each of its tokens, as they come."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool) -> None:
        """special: whether the text has the names of special tokens."""
        self._tokenizer, self._special = tokenizer, special
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def prompt(self, tokens: Iterable[int], text: str) -> list[int]:
        """Offsets of the tokens of a prompt, with which the text begins."""
        offsets = self.next(tokens)
        beyond = self._at - len(text)  # SentencePiece begins a text with a space that is not in it
        self._at = len(text)
        return [max(0, offset - beyond) for offset in offsets] if beyond > 0 else offsets

    def next(self, tokens: Iterable[int]) -> list[int]:
        """Offsets of the tokens that come next. Half a character begins where the character will be."""
        offsets = []
        for token in tokens:
            offsets.append(self._at)
            if self._special or not self._tokenizer.is_special(token):
                self._at += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offsets
