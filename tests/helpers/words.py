"""A tokenizer that needs no file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Words:
    """A tokenizer of one token a character, which may have a chat template."""

    vocab_size, eos_id, end_ids = 1_000_000, 0, frozenset({0})

    def __init__(self, chat_template: str | None = None) -> None:
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def as_prompt(self, text: str) -> str:
        return text

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token) for token in tokens if token)

    def conversation(
        self, messages: Sequence[Mapping[str, str]], tools: None = None, variables: Mapping[str, object] | None = None
    ) -> str | None:
        """A system message stands before the rest, which is one of the user."""
        *system, user = (message["content"] for message in messages)
        return None if self.chat_template is None else "".join(system) + self.chat_template.format(user)
