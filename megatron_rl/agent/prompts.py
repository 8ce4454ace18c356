"""How a problem is put to the model: a template with named fields, and the tokenizer's chat template around it."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Literal

from pydantic import model_validator

from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import Section


class PromptConfig(Section):
    """How an environment's questions are put to the model."""

    chat: Literal["always", "auto", "never"] = "auto"
    """always: as a user's message in the tokenizer's chat template. auto: so where it has one. never: as it stands."""
    system: str | None = None
    """The system message before it; default: what the chat template says by itself."""

    @model_validator(mode="after")
    def _is_a_chat(self) -> PromptConfig:
        if self.system is not None and self.chat == "never":
            raise ValueError("system: there is no system message with chat: never; put it into the prompt")
        return self


def template_fields(template: str, known: Sequence[str] | None = None) -> set[str]:
    """Names of the fields of a template in Python's format syntax. Raises ValueError where it is none, and for a field
    that is not among `known`, where these are given."""
    fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    unknown = sorted(fields - set(fields if known is None else known))
    if unknown:
        raise ValueError(f"unknown field {{{unknown[0]}}}; there are {', '.join(known or ())}")
    return fields


def render_prompt(tokenizer: Tokenizer, message: str, asking: PromptConfig) -> str:
    """The prompt that asks for an answer to `message`.

    Raises ValueError where a chat template is needed and there is none, or it knows no system message.
    """
    if _in_chat(tokenizer, asking):
        system = [] if asking.system is None else [{"role": "system", "content": asking.system}]
        prompt = tokenizer.conversation([*system, {"role": "user", "content": message}])
        assert prompt is not None  # there is a template
        return prompt
    needs = "chat: always" if asking.chat == "always" else "system" if asking.system is not None else None
    if needs:
        raise ValueError(f"environment.args.{needs}, but the tokenizer has no chat template")
    return tokenizer.as_prompt(message)


def prompt_format(tokenizer: Tokenizer, asking: PromptConfig) -> str:
    """What `render_prompt` puts around a message, in words for an evaluation's record; "" where it is nothing."""
    if not _in_chat(tokenizer, asking):
        return ""
    return "chat template" if asking.system is None else f"chat template, system message {asking.system!r}"


def _in_chat(tokenizer: Tokenizer, asking: PromptConfig) -> bool:
    return asking.chat != "never" and tokenizer.chat_template is not None


def next_turn(tokenizer: Tokenizer, *messages: str, role: str = "user") -> str:
    """The text between a response of the model, its end token included, and its next one, in which somebody else says
    `messages`: the chat template's, or lines of their own where there is none.

    Raises ValueError where the template refuses the role.
    """
    response = "\N{OBJECT REPLACEMENT CHARACTER}"
    said = [{"role": "user", "content": "-"}, {"role": "assistant", "content": response}]
    whole = tokenizer.conversation([*said, *({"role": role, "content": message} for message in messages)])
    if whole is None:
        return "".join(f"\n{message}\n" for message in messages)
    rest = whole.partition(response)[2]
    return next(
        (rest.removeprefix(end) for end in map(tokenizer.show, tokenizer.end_ids) if rest.startswith(end)), rest
    )
