"""Conversations by a renderer of the library for one model family."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, get_args

from renderers import (
    ParsedResponse,
    Renderer,
    RendererConfig,
    build_training_sample,
    config_from_name,
    create_renderer,
)

from megatron_rl.model.chat.formats import CallMarkup, Extension, LibraryTokenizer, TokenTexts, Tools
from megatron_rl.model.chat.messages import Conversation, Example, Message
from megatron_rl.model.chat.probes import ProbeConversation
from megatron_rl.model.chat.proof import Rendering
from megatron_rl.model.tokenizer import Tokenizer

GENERIC = ("auto", "default", "custom")


def renderer_names() -> list[str]:
    configs = get_args(get_args(RendererConfig)[0])
    names = [config.model_fields["name"].default for config in configs]
    return [name for name in names if isinstance(name, str) and name not in GENERIC]


class LibraryFormat:
    why_not: str | None = None
    strips = True
    tags: tuple[str, ...] = ()
    calls: CallMarkup | None = None

    def __init__(self, tokenizer: Tokenizer, name: str, variables: Mapping[str, Any]) -> None:
        """variables: of the chat template; those that the renderer does not know are left out.

        Raises ValueError if the tokenizer or the variables do not fit the renderer.
        """
        self.name, self._tokenizer = name, tokenizer
        self._texts = TokenTexts(tokenizer)
        self.renderer = self._built(variables)
        try:
            self._keeping = self._built({**variables, "thinking_retention": "all"})
        except ValueError:  # the variables ask for the contrary
            self._keeping = self.renderer
        self.stop_ids = frozenset(self.renderer.get_stop_token_ids())
        date = getattr(getattr(self.renderer, "config", None), "date_string", None)
        self.date: Mapping[str, Any] = {} if date is None else {"date_string": date}
        """Template variable of the day on which the renderer's conversations take place; no later turn has it."""

    def _built(self, variables: Mapping[str, Any]) -> Renderer:
        try:
            default = config_from_name(self.name)
            known = {*type(default).template_field_names(), "thinking_retention"} if default else set()
            config = type(default)(**{name: value for name, value in variables.items() if name in known})
            return create_renderer(LibraryTokenizer(self._tokenizer), config)
        except Exception as error:  # renderers check the tokenizer by assertions, lookups and types
            raise ValueError(f"the renderer {self.name} does not fit the tokenizer: {error}") from error

    def rendered(self, probe: ProbeConversation) -> list[int]:
        return self.renderer.render_ids(
            list(probe.messages), tools=list(probe.tools) or None, add_generation_prompt=True
        )

    def extend(
        self, prompt: list[int], answer: list[int], messages: list[Message], tools: Tools, *, keep_reasoning: bool
    ) -> Extension | None:
        renderer = self._keeping if keep_reasoning else self.renderer
        # The renderer ends a turn by its own token unless it finds a known end, so an end of ours is put back below.
        foreign = answer[-1:] if answer and answer[-1] in self._tokenizer.end_ids - self.stop_ids else []
        known = answer[: len(answer) - len(foreign)]
        try:
            found = renderer.bridge_to_next_turn(
                prompt,
                known,
                self._tokenizer.mark(messages),
                tools=self._tokenizer.mark(list(tools)) or None,
            )
        except Exception as error:  # a renderer refuses roles and contents by errors of any type
            raise ValueError(f"the renderer {self.name} refuses the messages: {error}") from error
        before = prompt + known
        if found is None or found.token_ids[: len(before)] != before:
            return None
        new = found.token_ids[len(before) + len(foreign) :]
        return Extension(before + foreign + new, self._texts.of(new))

    def parse(self, answer: list[int], prompt: list[int], tools: Tools) -> ParsedResponse:
        return self.renderer.parse_response(answer, tools=list(tools) or None, prompt_ids=prompt)

    def example(self, said: Conversation) -> tuple[Example, Rendering]:
        messages = self._tokenizer.mark([*said.messages])
        try:
            found = build_training_sample(
                self.renderer,
                messages,
                role_to_mask=lambda message: message["role"] == "assistant",
                tools=self._tokenizer.mark([*said.tools]) or None,
                ensure_final_stop=True,
                message_loss_mask=[*said.learned],
            )
        except Exception as error:  # a renderer refuses roles and contents by errors of any type
            raise ValueError(f"the renderer {self.name} refuses the messages: {error}") from error
        runs = groupby(zip(found.loss_mask, found.token_ids, strict=True), key=itemgetter(0))
        texts = [(is_learned, self._texts.of([token for _, token in run])) for is_learned, run in runs]
        learned = "\0".join(text for is_learned, text in texts if is_learned)
        return Example(found.token_ids, found.loss_mask), Rendering("".join(text for _, text in texts), learned)
