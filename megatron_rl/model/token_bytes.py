"""Bytes and text that a token adds in the middle of a text. Decoding the token alone does not always give them.

SentencePiece drops the space in front of a token that is decoded alone; half a character decodes to U+FFFD.
"""

from __future__ import annotations

import json
import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letters, one per byte: printable ones represent themselves, others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token: int) -> bytes:
        """Bytes of a token; of its name if it is special; none if the id is unused."""
        if token in self._added:
            return self._added[token].encode()
        name: str | None = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if "ByteLevel" in self._decoders:
            letters = _byte_letters()
            return b"".join(bytes([letters[each]]) if each in letters else each.encode() for each in name)
        if "ByteFallback" in self._decoders and (one := _ONE_BYTE.fullmatch(name)):
            return bytes([int(one[1], 16)])
        before, both = self._decoded(self._some), self._decoded([*self._some, token])
        return (both[len(before) :] if both.startswith(before) else self._decoded([token])).encode()

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text

    @cached_property
    def _added(self) -> dict[int, str]:
        return {token: added.content for token, added in self._tokenizer.added_tokens_decoder.items()}

    @cached_property
    def _some(self) -> list[int]:
        """Tokens of a short text, which put the token behind them in the middle of a text."""
        tokens: list[int] = self._tokenizer.encode("a", add_special_tokens=False)
        return tokens

    @cached_property
    def _decoders(self) -> set[str]:
        decoder = self._tokenizer.backend_tokenizer.decoder if self._tokenizer.is_fast else None
        if decoder is None:
            return set()
        described: dict[str, Any] = json.loads(decoder.__getstate__())
        return {each["type"] for each in described.get("decoders", [described])}


def texts_of(tokens: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """Return the text of each token of a sequence; together they are its text. A character that several tokens share is
    with the last of them; bytes that are not a character become U+FFFD."""
    decoder = getincrementaldecoder("utf-8")("replace")
    last = len(tokens) - 1
    return [decoder.decode(token_bytes(token), final=place == last) for place, token in enumerate(tokens)]
