"""A tokenizer that needs no file."""

from __future__ import annotations

from collections.abc import Sequence


class Words:
    """A tokenizer of one token a character, which may have a chat template."""

    vocab_size, eos_id, end_ids = 1_000_000, 0, frozenset({0})

    def __init__(self, template: str | None = None) -> None:
        self.template = template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token)

    def chat(self, message: str) -> str | None:
        return None if self.template is None else self.template.format(message)
