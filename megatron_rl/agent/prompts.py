"""How a problem is put to the model: a template with named fields, and the tokenizer's chat template around it."""

from __future__ import annotations

from collections.abc import Sequence
from string import Formatter
from typing import Literal

from megatron_rl.model.tokenizer import Tokenizer

Chat = Literal["always", "auto", "never"]


def template_fields(template: str, known: Sequence[str] | None = None) -> set[str]:
    """Names of the fields of a template in Python's format syntax. Raises ValueError where it is none, and for a field
    that is not among `known`, where these are given."""
    fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    unknown = sorted(fields - set(fields if known is None else known))
    if unknown:
        raise ValueError(f"unknown field {{{unknown[0]}}}; there are {', '.join(known or ())}")
    return fields


def asked(tokenizer: Tokenizer, message: str, chat: Chat) -> str:
    """The prompt that asks for an answer to `message`.

    chat: always or never in the tokenizer's chat template; auto: where it has one. Raises ValueError where it has none
        and the template is to be used always.
    """
    prompt = None if chat == "never" else tokenizer.chat(message)
    if prompt is None and chat == "always":
        raise ValueError("environment.args.chat: always, but the tokenizer has no chat template")
    return message if prompt is None else prompt


def in_chat(tokenizer: Tokenizer, chat: Chat) -> bool:
    """Whether `asked` uses the tokenizer's chat template."""
    return chat != "never" and tokenizer.chat("") is not None


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
