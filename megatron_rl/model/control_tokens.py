"""Control tokens written into a message stay text.

    mark(message)       input of a chat template: <|eot_id|> has a MARK behind its first character
    encode(rendered)    the template's own control tokens are tokens, marked ones are plain text

MARK is a noncharacter of Unicode, so no text should contain it. It is removed from messages and never encoded.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

MARK = "\ufdd0"


class ControlTokens:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        names = [each.content for each in added if each.special and len(each.content) > 1]
        longest_first = sorted(names, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, longest_first))) if names else None

    def mark(self, value: Any) -> Any:
        if isinstance(value, str):
            text = value.replace(MARK, "")
            # Repeat, because one name may start within another, and a match takes the characters of both. With the
            # names ab and ba, aba becomes a|ba (| for the mark), which still contains ba, and then a|b|a. Each turn
            # splits a name after its first character and creates none, so this ends.
            while self._names and self._names.search(text):
                text = self._names.sub(_marked, text)
            return text
        if isinstance(value, dict):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(each) for each in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        # Control tokens may affect the text around them: some consume the spaces beside them. So the text is encoded as
        # a whole, by a tokenizer that knows its control tokens only by marked names.
        assert self._names is not None
        swapped, end = "", 0
        for name in self._names.finditer(rendered):
            swapped += rendered[end : name.start()].replace(MARK, "") + _marked(name)
            end = name.end()
        swapped += rendered[end:].replace(MARK, "")
        tokenizer, ids = self._marked_tokenizer
        return [ids.get(token, token) for token in tokenizer.encode(swapped, add_special_tokens=False).ids]

    @cached_property
    def _marked_tokenizer(self) -> tuple[Backend, dict[int, int]]:
        """A tokenizer with marked names, and its ids of added tokens -> their ids in the real one."""
        from tokenizers import Tokenizer

        assert self._names is not None
        described = json.loads(self._backend.to_str())
        described |= {"truncation": None, "padding": None, "post_processor": None}
        ids = {}
        for added in described["added_tokens"]:
            if added["special"]:
                added["content"] = self._names.sub(_marked, added["content"])
            ids[added["content"]] = added["id"]
        tokenizer = Tokenizer.from_str(json.dumps(described))
        numbers = ((tokenizer.token_to_id(name), token) for name, token in ids.items())
        return tokenizer, {number: token for number, token in numbers if number is not None}


def _marked(name: re.Match[str]) -> str:
    return f"{name[0][0]}{MARK}{name[0][1:]}"
