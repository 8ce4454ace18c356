"""Prompts: a template with named fields, inside the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Literal

from pydantic import model_validator

from megatron_rl.chat.chat import Chat
from megatron_rl.chat.config import ChatConfig
from megatron_rl.chat.conversation import conversation_of
from megatron_rl.model.tokenizer import Tokenizer


class PromptConfig(ChatConfig):
    """Prompt format of an environment's questions."""

    chat: Literal["always", "auto", "never"] = "auto"
    """always: send the question as a user message in the tokenizer's chat template. auto: do so if the tokenizer has
    one. never: send the plain text."""
    system: str | None = None
    """System message; default: the chat template's own."""

    @model_validator(mode="after")
    def _is_a_chat(self) -> PromptConfig:
        if self.system is not None and self.chat == "never":
            raise ValueError("system: there is no system message with chat: never; put it into the prompt")
        if self.chat_template and self.chat == "never":
            raise ValueError("chat_template: with chat: never the chat template is not used")
        return self


def template_fields(template: str, known: Sequence[str] | None = None) -> set[str]:
    """Return the names of the fields of a template in Python's format syntax.

    Raises ValueError if the template is invalid or has a field that is not in `known`, where that is given.
    """
    fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    unknown = sorted(fields - set(fields if known is None else known))
    if unknown:
        raise ValueError(f"unknown field {{{unknown[0]}}}; available are {', '.join(known or ())}")
    return fields


def render_prompt(tokenizer: Tokenizer, message: str, config: PromptConfig) -> str:
    """Return the prompt that requests an answer to `message`.

    Raises ValueError if a chat template is required but missing, or if it does not support the system message.
    """
    if in_chat(tokenizer, config):
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        asked = conversation_of([*system, {"role": "user", "content": message}])
        return Chat.of(tokenizer, config.chat_template).text(asked)
    given = {"chat: always": config.chat == "always", "system": config.system, "chat_template": config.chat_template}
    if needs := next((name for name, value in given.items() if value), None):
        raise ValueError(f"environment.args.{needs}, but the tokenizer has no chat template")
    return tokenizer.as_prompt(message)


def prompt_format(tokenizer: Tokenizer, config: PromptConfig) -> str:
    """Describe what `render_prompt` puts around a message, for an evaluation's record; "" if nothing."""
    if not in_chat(tokenizer, config):
        return ""
    variables = [f"{name} {value!r}" for name, value in sorted(config.chat_template.items())]
    system = [] if config.system is None else [f"system message {config.system!r}"]
    return ", ".join(["chat template", *variables, *system])


def in_chat(tokenizer: Tokenizer, config: PromptConfig) -> bool:
    """Whether questions are messages in the tokenizer's chat template."""
    return config.chat != "never" and tokenizer.chat_template is not None
