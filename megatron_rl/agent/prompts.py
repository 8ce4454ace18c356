"""Prompts: a text with named fields, or a list of messages, inside the tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any, Literal

from pydantic import model_validator

from megatron_rl.agent.text_rows import parse_json
from megatron_rl.model.chat.chat import Chat
from megatron_rl.model.chat.conversation import Conversation, ConversationError, conversation_of
from megatron_rl.model.tokenizer import CharacterTokenizer, Tokenizer
from megatron_rl.recipe.chat_section import ChatConfig


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
    """Return the names of the fields of a template in Python's format syntax. Raises ValueError if the template is
    invalid or has a field that is not in `known`, where that is given."""
    fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    unknown = sorted(fields - set(fields if known is None else known))
    if unknown:
        raise ValueError(f"unknown field {{{unknown[0]}}}; available are {', '.join(known or ())}")
    return fields


def render_prompt(tokenizer: Tokenizer, message: str, config: PromptConfig) -> str:
    """Return the prompt that requests an answer to `message`. Raises ValueError if a chat template is required but
    missing, or if it does not support the system message."""
    if in_chat(tokenizer, config):
        chat, asked = Chat(tokenizer, config.chat_template), conversation_of([{"role": "user", "content": message}])
        if config.system is None:
            return chat.text(asked)
        try:
            return chat.text(conversation_of([{"role": "system", "content": config.system}]) + asked)
        except ValueError as error:
            chat.text(asked)  # raises where the question is to blame
            raise ValueError(
                "environment.args.system: the model's chat template does not take a system message "
                f"({error.__cause__ or error}); put it into environment.args.prompt"
            ) from error
    given = {"chat: always": config.chat == "always", "system": config.system, "chat_template": config.chat_template}
    if needs := next((name for name, value in given.items() if value), None):
        raise ValueError(f"environment.args.{needs}, but the tokenizer has no chat template")
    return tokenizer.as_prompt(message)


def messages_in(value: Any, column: str) -> list[Any] | None:
    """Return the messages that a value of a data set holds: a list of them, one alone, an object of lists as older sets
    of `datasets` store it, or the JSON text of these, which is all that CSV can hold. None for other texts and for
    numbers.

    A list or an object that is not a message is returned too: `conversation_of` refuses it by its place.
    """
    found = value
    if is_text := isinstance(value, str):
        if not value.lstrip().startswith(("[", "{")):
            return None
        try:
            found = parse_json(value, column)
        except ValueError:
            return None
    if isinstance(found, Mapping):
        if found and all(isinstance(each, list) for each in found.values()):
            found = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=False)]
        else:
            found = [found]
    if not isinstance(found, list) or (is_text and not (found and all(map(_is_message, found)))):
        return None
    return found


def _is_message(value: Any) -> bool:
    pairs = ({"role", "content"}, {"role", "tool_calls"}, {"from", "value"})
    return isinstance(value, Mapping) and any(pair <= value.keys() for pair in pairs)


def render_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    config: PromptConfig,
    column: str,
    *,
    tools: Any = None,
    ask: Callable[[str], str] | None = None,
) -> str:
    """Return the prompt of a list of messages. Without a chat template, the texts of the system and of the user follow
    each other.

    Args:
        column: name of the messages, for errors.
        tools: definitions of the tools that the prompt offers.
        ask: makes of the last text of the user what the prompt asks instead.

    Raises ValueError for messages that cannot be understood, that ask nothing, or that the chat template refuses.
    """
    found = conversation_of(messages, tools, field=column)
    last = found.messages[-1]["role"] if found.messages else "nobody"
    if last not in ("user", "tool"):
        raise ConversationError(column, f"is a prompt without a question: its last message is from {last}")
    if ask is not None:
        found = _with_question(found, ask, column)
    is_chat, system = in_chat(tokenizer, config), config.system
    says_system = system is not None if is_chat else bool(system)
    if says_system and not any(message["role"] == "system" for message in found.messages):
        found = conversation_of([{"role": "system", "content": system}], field="system") + found
    return Chat(tokenizer, config.chat_template).text(found) if is_chat else _plain(found, config)


def _with_question(conversation: Conversation, ask: Callable[[str], str], column: str) -> Conversation:
    """Return the conversation with another last message of the user. Raises ConversationError if it has none."""
    messages = [*conversation.messages]
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise ConversationError(column, "has no message of the user, which `prompt` and `remove` could change")
    messages[asked[-1]] = {**messages[asked[-1]], "content": ask(messages[asked[-1]]["content"])}
    return replace(conversation, messages=tuple(messages))


def _plain(conversation: Conversation, config: PromptConfig) -> str:
    if config.chat == "always":
        raise ValueError("environment.args.chat: always, but the tokenizer has no chat template")
    if conversation.tools:
        raise ConversationError("tools", "only a chat template can write definitions of tools")
    for message, place in zip(conversation.messages, conversation.places, strict=True):
        if message["role"] not in ("system", "user"):
            raise ConversationError(place, f"is from {message['role']}, which only a chat template can write")
    return "\n\n".join(message["content"] for message in conversation.messages)


def check_characters(tokenizer: Tokenizer, prompt: str) -> None:
    """Raise ValueError if a prompt has half a character, or one for which a tokenizer of characters has no token.
    Others have tokens for every text."""
    if not prompt.isascii():
        prompt.encode()
    if isinstance(tokenizer, CharacterTokenizer):
        tokenizer.encode(prompt)


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
