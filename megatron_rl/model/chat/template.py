"""Conversations by the chat template alone, for models without a renderer in the library.

The text that the template writes after an answer is found by rendering a conversation with a placeholder as its answer.
It continues any conversation if the template only appends, which probes check.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from renderers import DefaultRenderer, ParsedResponse
from renderers.configs import DefaultRendererConfig
from renderers.parsers import TOOL_PARSERS

from megatron_rl.model.chat.formats import CallMarkup, Extension, LibraryTokenizer, Tools, call_markup, token_named
from megatron_rl.model.chat.messages import THINK, THINK_END, Conversation, ConversationError, Example, Message
from megatron_rl.model.chat.probes import ANSWER, ARGUMENTS, MORE, SYSTEM, TOOL, USER, ProbeConversation, calling
from megatron_rl.model.chat.proof import Rendering
from megatron_rl.model.chat.turn_end import PLACEHOLDER, turn_end
from megatron_rl.model.tokenizer import Tokenizer

THOUGHT_TOKENS = 8
_THOUGHT = f"{THINK}\nHm.\n{THINK_END}\n\n"
_APPENDED = (
    (ProbeConversation("a question", [USER]), [MORE]),
    (ProbeConversation("a system message", [SYSTEM, USER]), [MORE]),
    (ProbeConversation("several turns", [SYSTEM, USER, ANSWER, MORE]), [USER]),
)


class _Tail(NamedTuple):
    end: list[int]  # tokens that end the answer, up to its end token; empty if the template writes none
    rest: list[int]
    text: str


class TemplateFormat:
    name = "template"
    strips = False

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._variables = tokenizer, variables
        self.stop_ids = tokenizer.end_ids
        end = turn_end(tokenizer)
        ends = self.stop_ids if end is None else self.stop_ids | {end}
        self._ends = {token: tokenizer.show(token) for token in ends}
        self._think = token_named(tokenizer, THINK)
        tokens = (self._think, token_named(tokenizer, THINK_END))
        self.tags: tuple[str, ...] = () if None not in tokens else (THINK, THINK_END)
        self.why_not = None if self._only_appends("") else "the chat template changes what it has written before"
        self._keeps_reasoning = self._only_appends(_THOUGHT)
        self.calls: CallMarkup | None = None
        self._parser = self._with_calls()

    def extend(
        self, prompt: list[int], answer: list[int], messages: list[Message], tools: Tools, *, keep_reasoning: bool
    ) -> Extension | None:
        if any(message["role"] == "assistant" for message in messages):
            return None
        if not keep_reasoning and (self.why_not or (not self._keeps_reasoning and self._reasons(answer, prompt))):
            return None
        tail = self._tail(messages, tools)
        if tail is None:
            return None
        ended = bool(answer) and answer[-1] in self._tokenizer.end_ids
        return Extension(prompt + answer + ([] if ended else tail.end) + tail.rest, tail.text)

    def parse(self, answer: list[int], prompt: list[int], tools: Tools) -> ParsedResponse:
        # The library looks for an open thought behind a header of Qwen's only.
        opened = self._opens_thought(prompt)
        return self._parser.parse_response(answer, prompt_ids=self._tokenizer.encode(THINK) if opened else None)

    def example(self, said: Conversation) -> tuple[Example, Rendering]:
        """Cut the whole conversation where the prompts of the learned answers end. Each part is encoded by itself, as a
        prompt is when the model answers it. The first end token behind a prompt ends the answer."""
        messages, tools = [*said.messages], said.tools
        whole = self._text(messages, tools, generation=False)
        asked = [index for index, is_learned in enumerate(said.learned) if is_learned]
        prompts = [self._text(messages[:index], tools) for index in asked]
        if asked and asked[-1] == len(messages) - 1:
            whole = self._within_opened_thought(whole, prompts[-1], messages[-1])
        for index, prompt in zip(asked, prompts, strict=True):
            if not whole.startswith(prompt):
                raise ConversationError(
                    said.places[index],
                    "the chat template writes the conversation before it in other words once it goes on: name the "
                    "renderer of the model (tokenizer.renderer)",
                )
        cuts = [0, *map(len, prompts), len(whole)]
        parts = [whole[start:end] for start, end in pairwise(cuts)]
        tokens = self._tokenizer.encode(parts[0])
        found = Example(tokens, [False] * len(tokens))
        for index, part in zip(asked, parts[1:], strict=True):
            tokens = self._tokenizer.encode(part)
            ends = (place for place, token in enumerate(tokens, 1) if token in self._ends)
            if (learned := next(ends, None)) is None:
                if index != len(messages) - 1:
                    raise ConversationError(said.places[index], "the chat template writes no end token behind it")
                tokens.append(self._tokenizer.eos_id)
                learned = len(tokens)
            found.tokens.extend(tokens)
            found.loss_mask.extend([True] * learned + [False] * (len(tokens) - learned))
        return found, Rendering(whole, "\0".join(map(self._answer, parts[1:])))

    def _within_opened_thought(self, whole: str, prompt: str, answer: Message) -> str:
        """Return a conversation whose last answer goes on in the thought that its prompt opens, as the model's answer
        does, also if the template writes the answer without one."""
        before, tag, opened = prompt.rpartition(THINK)
        if whole.startswith(prompt) or not tag or opened.strip() or not whole.startswith(before):
            return whole
        thought = answer.get("reasoning_content") or answer["content"].rpartition(THINK_END)[0].lstrip()
        thought = self._tokenizer.mark(thought.removeprefix(THINK).strip())
        return f"{prompt}{thought}\n{THINK_END}\n\n{whole[len(before) :].lstrip()}"

    def _answer(self, part: str) -> str:
        return part[: min((at for name in self._ends.values() if (at := part.find(name)) >= 0), default=len(part))]

    def _opens_thought(self, prompt: list[int]) -> bool:
        return self._tokenizer.decode(prompt[-THOUGHT_TOKENS:], special=True).rstrip().endswith(THINK)

    def _reasons(self, answer: list[int], prompt: list[int]) -> bool:
        if self._opens_thought(prompt):
            return True
        return self._think in answer if self._think is not None else THINK in self._tokenizer.decode(answer)

    def _tail(self, messages: list[Message], tools: Tools) -> _Tail | None:
        """Return None if the template does not write the answer of an earlier turn as it is."""
        asked: Message = {"role": "user", "content": "-"}
        before = [asked, {"role": "assistant", "content": PLACEHOLDER}]
        rest = self._text([*before, *messages], tools).partition(PLACEHOLDER)
        alone = self._text(before, tools, generation=False).partition(PLACEHOLDER)[2]
        if not rest[1]:
            return None
        end = self._tokenizer.encode(alone)
        closes = next((place for place, token in enumerate(end, 1) if self._tokenizer.is_special(token)), 0)
        tokens = self._tokenizer.encode(rest[2])
        closes = closes if tokens[:closes] == end[:closes] else 0
        return _Tail(tokens[:closes], tokens[closes:], rest[2])

    def _only_appends(self, thought: str) -> bool:
        """Whether an answer leaves the conversation before it as it was, also one that begins with a thought."""
        answer: Message = {"role": "assistant", "content": thought + PLACEHOLDER}
        tail_free = []
        for probe, more in _APPENDED:
            try:
                prompt = self._text([*probe.messages])
                whole = self._text([*probe.messages, answer, *more])
                plain: Message = {"role": "assistant", "content": PLACEHOLDER}
                tail = self._text([USER, plain, *more]).partition(PLACEHOLDER)[2]
            except ValueError:
                continue  # the template refuses such a conversation, such as one with a system message
            opens = prompt.rstrip().endswith(THINK)  # a thought, which earlier turns may lack
            begun = prompt.rstrip().removesuffix(THINK) if opens else prompt
            tail_free.append(whole.startswith(begun) and whole.endswith(thought + PLACEHOLDER + tail))
        return bool(tail_free) and all(tail_free)

    def _with_calls(self) -> DefaultRenderer:
        """Return the library's generic parser, with the format of tool calls whose answers it reads back."""
        tokenizer = LibraryTokenizer(self._tokenizer, shows_special=False)
        try:
            asked = self._tokenizer.encode(self._text([USER], [TOOL]))
            called = self._tokenizer.encode(self._text([USER, calling()], [TOOL], generation=False))
        except ValueError:
            return DefaultRenderer(tokenizer)
        same = next((n for n, pair in enumerate(zip(asked, called, strict=False)) if pair[0] != pair[1]), len(asked))
        answer = called[same:]
        for name in TOOL_PARSERS:
            parser = DefaultRenderer(tokenizer, DefaultRendererConfig(tool_parser=name))
            markup = call_markup(self._tokenizer, parser, answer, [TOOL])
            if markup and (markup[1].tool_calls[0].name, markup[1].tool_calls[0].arguments) == ("look_up", ARGUMENTS):
                self.calls = markup[0]
                return parser
        return DefaultRenderer(tokenizer)

    def _text(self, messages: list[Message], tools: Tools = (), *, generation: bool = True) -> str:
        text = self._tokenizer.conversation(
            messages, [dict(tool) for tool in tools] or None, self._variables, add_generation_prompt=generation
        )
        assert text is not None  # there is a template
        return text
