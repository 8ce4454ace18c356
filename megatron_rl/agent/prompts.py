"""Prompts: a template with named fields, inside the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Literal

from pydantic import model_validator

from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import Section


class PromptConfig(Section):
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
    if _in_chat(tokenizer, config):
        system = [] if config.system is None else [{"role": "system", "content": config.system}]
        prompt = tokenizer.conversation([*system, {"role": "user", "content": message}])
        assert prompt is not None  # there is a template
        return prompt
    needs = "chat: always" if config.chat == "always" else "system" if config.system is not None else None
    if needs:
        raise ValueError(f"environment.args.{needs}, but the tokenizer has no chat template")
    return tokenizer.as_prompt(message)


def prompt_format(tokenizer: Tokenizer, config: PromptConfig) -> str:
    """Describe what `render_prompt` puts around a message, for an evaluation's record; "" if nothing."""
    if not _in_chat(tokenizer, config):
        return ""
    return "chat template" if config.system is None else f"chat template, system message {config.system!r}"


def _in_chat(tokenizer: Tokenizer, config: PromptConfig) -> bool:
    return config.chat != "never" and tokenizer.chat_template is not None


def next_turn(tokenizer: Tokenizer, *messages: str, role: str = "user") -> str:
    """Return the text between one response of the model, its end token included, and its next one: `messages` of
    another role in the chat template's markup, or on lines of their own if there is no template.

    Raises ValueError if the template rejects the role.
    """
    response = "\N{OBJECT REPLACEMENT CHARACTER}"
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": response}]
    whole = tokenizer.conversation([*before, *({"role": role, "content": message} for message in messages)])
    if whole is None:
        return "".join(f"\n{message}\n" for message in messages)
    rest = whole.partition(response)[2]
    return next(
        (rest.removeprefix(end) for end in map(tokenizer.show, tokenizer.end_ids) if rest.startswith(end)), rest
    )
