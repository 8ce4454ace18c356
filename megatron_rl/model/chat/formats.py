"""How one model writes conversations: the interface of its two implementations, and what both need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from renderers import ParsedResponse, Renderer

from megatron_rl.model.chat.messages import Conversation, Example, Message
from megatron_rl.model.chat.proof import Rendering
from megatron_rl.model.tokenizer import PROMPT_MARK, Tokenizer

Tools = Sequence[Mapping[str, Any]]
LETTERS = "xaeXA01="


class CallMarkup(NamedTuple):
    tagged: bool
    first: str


class Extension(NamedTuple):
    tokens: list[int]
    text: str


class TokenTexts(dict[int, bytes]):
    """Bytes of each token; those of tokens that were asked for are kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        self[token] = found = self._tokenizer.token_bytes(token)
        return found

    def of(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self.__getitem__, tokens)).decode(errors="replace")


class ConversationFormat(Protocol):
    """How one model writes conversations."""

    name: str
    why_not: str | None
    calls: CallMarkup | None
    strips: bool
    tags: tuple[str, ...]  # tags of reasoning that are text, because no single token stands for them
    stop_ids: frozenset[int]

    def extend(
        self, prompt: list[int], answer: list[int], messages: list[Message], tools: Tools, *, keep_reasoning: bool
    ) -> Extension | None:
        """Return the next prompt, which begins with prompt and answer; None if that cannot be proven right."""

    def parse(self, answer: list[int], prompt: list[int], tools: Tools) -> ParsedResponse:
        """Divide an answer. It may raise anything: the answer can be any text."""

    def example(self, said: Conversation) -> tuple[Example, Rendering]:
        """Return a whole conversation with the tokens of the learned messages. Raises ValueError."""


class LibraryTokenizer:
    """A tokenizer with the names of the library. Marked control tokens are text."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, *, shows_special: bool = True) -> None:
        """shows_special: whether decoded text includes the names of control tokens."""
        self._tokenizer, self._shows_special = tokenizer, shows_special
        self.eos_token_id = tokenizer.eos_id
        self.all_special_tokens: list[str] = []

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._tokenizer.encode(text.replace(PROMPT_MARK, ""))

    def decode(self, token_ids: Sequence[int], *args: Any, **kwargs: Any) -> str:
        return self._tokenizer.decode(token_ids, special=self._shows_special)

    def convert_tokens_to_ids(self, tokens: str) -> int | None:
        return token_named(self._tokenizer, tokens)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("conversations are rendered elsewhere")


def token_named(tokenizer: Tokenizer, name: str) -> int | None:
    try:
        ids = tokenizer.encode(name)
    except ValueError:
        return None
    return ids[0] if len(ids) == 1 and tokenizer.show(ids[0]) == name else None


@lru_cache(maxsize=8)
def letter_of(tokenizer: Tokenizer) -> str:
    """Return a letter that the tokenizer has; "" if it has none of some common ones."""
    for letter in LETTERS:
        try:
            if tokenizer.decode(tokenizer.encode(letter)) == letter:
                return letter
        except ValueError:
            continue
    return ""


def is_markup(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token may be more than text: a control token, or a tag such as <tool_call> or [TOOL_CALLS]."""
    if tokenizer.is_special(token):
        return True
    name = tokenizer.show(token)
    return len(name) > 2 and (name[0] + name[-1]) in ("<>", "[]")


def call_markup(
    tokenizer: Tokenizer, renderer: Renderer, answer: list[int], tools: Tools
) -> tuple[CallMarkup, ParsedResponse] | None:
    """Parse an answer that consists of one call; return how it begins. None if it has no call."""
    try:
        found = renderer.parse_response(answer, tools=list(tools))
    except Exception:  # noqa: BLE001 - a parser of another format may raise anything
        return None
    if len(found.tool_calls) != 1 or found.tool_calls[0].token_span is None:
        return None
    begin = answer[found.tool_calls[0].token_span[0]]
    return CallMarkup(is_markup(tokenizer, begin), tokenizer.show(begin)[:1]), found
