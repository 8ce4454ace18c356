"""An answer in parts, as it is sampled; no part is ever taken back.

Between two tags the text belongs to one part of the answer, so only its new tokens are decoded. At a tag the library
reads the answer so far with one more letter, and where that letter arrives is where the text goes on. Text that may yet
turn out otherwise is held back until the answer has ended: a call without an end, and what follows a broken one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.model.chat.answer_parser import AnswerParser, call_of
from megatron_rl.model.chat.formats import ConversationFormat, Tools, is_markup, letter_of
from megatron_rl.model.chat.messages import THINK, THINK_END, ParsedAnswer, ToolCall
from megatron_rl.model.text_stream import IncrementalDecoder, overlap
from megatron_rl.model.tokenizer import Tokenizer

MOST_READINGS = 64
"""Tags of an answer at which it is read; from then on it must have grown by a quarter, so that the cost stays linear in
its length."""


@dataclass(slots=True)
class AnswerPiece:
    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class _Part:
    """Text of one part. White space at its ends is certain only later."""

    def __init__(self) -> None:
        self.given = ""
        self.held = ""
        self.strips = False

    def push(self, text: str) -> str:
        """Add text and return what is certain: everything up to the last character that is not white space."""
        text = self.held + text
        if not self.given and self.strips:
            text = text.lstrip()
        certain = len(text.rstrip())
        new, self.held = text[:certain], text[certain:]
        self.given += new
        return new

    def set(self, whole: str) -> str:
        """Replace the text by all of it, and return what is new. Text that differs from what was given adds nothing."""
        if not whole.startswith(self.given):
            self.held = ""
            return ""
        self.held = ""
        return self.push(whole[len(self.given) :])

    def finish(self, whole: str) -> str:
        return whole[len(self.given) :] if whole.startswith(self.given) else ""


class AnswerStream:
    def __init__(self, form: ConversationFormat | None, tokenizer: Tokenizer, prompt: list[int], tools: Tools) -> None:
        """form: None without a chat template: all text is content."""
        self._form, self._tokenizer, self._tools = form, tokenizer, tools
        self._parser = AnswerParser(form, tokenizer, prompt, tools) if form is not None else None
        self._letter = letter_of(tokenizer)
        self._tokens: list[int] = []
        self._read: list[int] = []  # the same, with the markup of calls that are only text spelled out
        self._reasoning, self._content = _Part(), _Part()
        self._calls = 0
        self._broken = False
        self._markup: dict[int, bool] = {}
        self._readings, self._read_at = 0, 0
        self._part: _Part | None = self._content
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._loose = ""  # text that may be the beginning of a tag that is not a token
        if form is not None:
            self._reasoning.strips, self._content.strips = True, form.strips
            self._settle(AnswerPiece())

    def push(self, tokens: Sequence[int]) -> AnswerPiece:
        piece = AnswerPiece()
        ended = self._parser.without_end(tokens) if self._parser else list(tokens)
        self._tokens += tokens
        run: list[int] = []
        for token in ended:
            self._read.append(token)
            if self._is_markup(token):
                self._add(piece, run)
                run = []
                self._settle(piece)
            else:
                run.append(token)
        self._add(piece, run)
        return piece

    def finish(self) -> AnswerPiece:
        if self._parser is None:
            return AnswerPiece(content=self._content.held + self._decoder.finish())
        whole = self._parser.read(self._tokens)
        return AnswerPiece(
            self._reasoning.finish(whole.reasoning_content or ""),
            self._content.finish(whole.content),
            [*whole.tool_calls[self._calls :]],
        )

    def _is_markup(self, token: int) -> bool:
        if self._form is None:
            return False
        if token not in self._markup:
            self._markup[token] = is_markup(self._tokenizer, token)
        return self._markup[token]

    def _add(self, piece: AnswerPiece, run: list[int]) -> None:
        text = self._decoder.push(run)
        if self._part is None or not text:
            return
        if self._form is not None and self._form.tags:
            self._loose += text
            tag = THINK_END if self._part is self._reasoning else THINK if not self._content.given else ""
            begun = self._loose if self._part is self._reasoning else self._loose.lstrip()
            if tag and (tag in begun if self._part is self._reasoning else begun.startswith(tag)):
                self._settle(piece)
                return
            kept = overlap(self._loose, tag) if tag and (self._part is self._reasoning or tag.startswith(begun)) else 0
            text, self._loose = self._loose[: len(self._loose) - kept], self._loose[len(self._loose) - kept :]
        if self._begins_call(text):
            self._part = None
            return
        self._give(piece, self._part, self._part.push(text))

    def _begins_call(self, text: str) -> bool:
        """Whether the text may be a call in a format without a token that begins calls."""
        markup = self._form.calls if self._form and self._tools else None
        if markup is None or markup.tagged or self._content.given or self._part is not self._content:
            return False
        return (self._content.held + text).lstrip().startswith(markup.first)

    def _settle(self, piece: AnswerPiece) -> None:
        """Read the answer so far, return what is certain, and find the part that goes on."""
        assert self._parser is not None
        self._decoder = IncrementalDecoder(self._tokenizer.decode, after=self._read)
        self._loose = ""
        self._readings += 1
        if (
            self._broken
            or not self._letter
            or (self._readings > MOST_READINGS and len(self._read) < 1.25 * self._read_at)
        ):
            self._part = None
            return
        self._read_at = len(self._read)
        # The library says what an answer holds, and not where the next token will belong. So it reads the answer with
        # one more letter, and the part that ends with this letter goes on. Example: `<think>So</think>4` and an x are
        # the thought `So` and the content `4x`, so content goes on and 4 is certain. If no part ends with the letter,
        # a call is open, and nothing more is certain until its end. The tag of a call that is only text, such as one in
        # a thought, is spelled out, and the answer read again.
        letter = self._tokenizer.encode(self._letter)
        found = self._parser.parsed(self._read + letter)
        while self._parser.first_is_text(self._read + letter, found):
            begin = span[0] if (span := found.tool_calls[0].token_span) else len(self._read)
            spelled = self._parser.spelled_out(self._read, begin) if begin < len(self._read) else None
            if spelled is None:
                break
            self._read = spelled
            found = self._parser.parsed(self._read + letter)
        closed = [each for each in found.tool_calls if each.token_span and each.token_span[1] <= len(self._read)]
        calls = [call for each in closed if (call := call_of(each)) is not None]
        self._broken = len(calls) < len(closed)
        goes_on = (
            self._content
            if found.content.endswith(self._letter)
            else self._reasoning
            if (found.reasoning_content or "").endswith(self._letter)
            else None
        )
        whole = self._without_letter(found.content, found.reasoning_content, calls)
        if whole.reasoning_content:
            self._give(piece, self._reasoning, self._reasoning.set(whole.reasoning_content))
            self._content.strips = True
        self._give(piece, self._content, self._content.set(whole.content))
        if self._tools and not self._broken:
            piece.calls += calls[self._calls :]
            self._calls = max(self._calls, len(calls))
        self._part = None if self._broken else goes_on

    def _without_letter(self, content: str, reasoning: str | None, calls: list[ToolCall]) -> ParsedAnswer:
        assert self._parser is not None
        found = self._parser.divided(content, reasoning, calls)
        if found.content.endswith(self._letter):
            return replace(found, content=found.content.removesuffix(self._letter))
        return replace(found, reasoning_content=(found.reasoning_content or "").removesuffix(self._letter))

    def _give(self, piece: AnswerPiece, part: _Part, text: str) -> None:
        if part is self._reasoning:
            piece.reasoning += text
        else:
            piece.content += text
