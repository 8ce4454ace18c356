"""Rows of supervised training: read from a data set, or the worked examples of an environment, and turned into tokens.

A row is a `Problem`, so that the prompt stream, the digests and the record treat rows as they treat problems.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_rl.agent.api import Demonstrator, Environment
from megatron_rl.agent.datasets import Source, check_column, read_rows
from megatron_rl.agent.text_rows import as_text, value_at
from megatron_rl.agent.trajectories import Problem
from megatron_rl.chat.chat import Chat
from megatron_rl.chat.conversation import conversation_of
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.supervised.config import DataConfig

logger = logging.getLogger(__name__)

CHECKED = 16
"""Rows that are turned into tokens at the start. A template that refuses one of them probably refuses most."""


class Example(NamedTuple):
    """A row as tokens."""

    tokens: list[int]
    """[tokens]"""
    loss_mask: list[bool]
    """[tokens] whether the token is learned; never the first one, which no token predicts."""


class UnusableRow(ValueError):
    """A row that cannot be trained on."""


def rows_of(data: DataConfig, environment: object) -> list[Problem]:
    """Return the rows to train on, in their order.

    environment: source of worked examples if `data` names no data set.

    Raises ConfigurationError if there are none, or the data does not match the configuration.
    """
    if data.path is None:
        pairs = demonstrations(environment) or _gold_responses(environment)
        if not pairs:
            raise ConfigurationError(
                "data.path is missing and the environment has no worked examples: name a data set, or give the "
                "environment `demonstrations` (megatron_rl.agent.api.Demonstrator) or `gold_response`"
            )
        return [_row({"prompt": prompt, "answer": answer, "plain": True}) for prompt, answer in pairs]
    found, rows = [], 0
    try:
        for number, row in enumerate(read_rows(Source(path=data.path, split=data.split, subset=data.subset))):
            rows = number + 1
            if (values := _values(data, row, number)) is not None:
                found.append(_row(values))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if not found:
        raise ConfigurationError(f"data set {data.path}, split {data.split}: no row has {_wanted(data)}")
    if len(found) < rows:
        logger.warning(
            "data set %s, split %s: %d of %d rows are skipped, because they lack %s",
            *(data.path, data.split, rows - len(found), rows, _wanted(data)),
        )
    return found


def demonstrations(environment: object) -> Sequence[tuple[str, str]]:
    """Return the worked examples of an environment: prompts, as the model sees them, and answers."""
    return environment.demonstrations() if isinstance(environment, Demonstrator) else []


def _gold_responses(environment: object) -> Sequence[tuple[str, str]]:
    """Return the training problems of an environment with a right response each; none if it has no gold responses."""
    if not isinstance(environment, Environment):
        return []
    problems = [problem for each in environment.training_sets() for problem in each.problems if problem.is_prompt]
    try:
        return [(problem.prompt, environment.gold_response(problem)) for problem in problems]
    except NotImplementedError:
        return []


def token_example(prompt: str, answer: str, tokenizer: Tokenizer) -> Example:
    """Tokenize a prompt and its answer. The answer and its end token are learned."""
    asked, answered = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_id]
    return Example(asked + answered, [False] * len(asked) + [True] * len(answered))


class RowEncoder:
    """Turns rows into tokens."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer, longest: int) -> None:
        """longest: tokens of the longest row that is trained on."""
        self._data, self._tokenizer, self._longest = data, tokenizer, longest
        self._chat = Chat.of(tokenizer, data.chat_template)

    def example(self, row: Problem) -> Example:
        """Return the tokens of a row. Raises UnusableRow."""
        values = row.golden
        try:
            found = self._conversation(values) if "messages" in values else self._pair(values)
        except ValueError as error:
            raise UnusableRow(str(error)) from error
        if len(found.tokens) > self._longest:
            raise UnusableRow(TOO_LONG)
        if not any(found.loss_mask[1:]):
            raise UnusableRow("it has no token to learn: no message is the assistant's, or its answer is empty")
        return found._replace(loss_mask=[False, *found.loss_mask[1:]])

    def check(self, rows: Sequence[Problem]) -> None:
        """Raise ConfigurationError if one of the first rows cannot be turned into tokens; long ones can."""
        for number, row in enumerate(rows[:CHECKED]):
            try:
                self.example(row)
            except UnusableRow as error:
                if str(error) != TOO_LONG:
                    raise ConfigurationError(f"data: row {number + 1} cannot be trained on: {error}") from error

    def _conversation(self, values: Mapping[str, Any]) -> Example:
        return Example(*self._chat.example(conversation_of(values["messages"], values.get("tools"))))

    def _pair(self, values: Mapping[str, Any]) -> Example:
        prompt, answer, chat = values["prompt"], values["answer"], self._data.chat
        if values.get("plain"):  # the environment has already put the prompt into the chat template
            return token_example(prompt, answer, self._tokenizer)
        if chat == "always" or (chat == "auto" and self._chat.has_template):
            system = [] if self._data.system is None else [{"role": "system", "content": self._data.system}]
            turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            return Example(*self._chat.example(conversation_of([*system, *turns])))
        if self._data.system is not None or self._data.chat_template:
            raise ValueError("data.system or data.chat_template is given, but the tokenizer has no chat template")
        return token_example(self._tokenizer.as_prompt(prompt), answer, self._tokenizer)


TOO_LONG = "it is longer than training.sequence_length"


def _row(values: Mapping[str, Any]) -> Problem:
    """Make a row, whose text is that of its values: the digest of the rows covers all that is learned."""
    return Problem(json.dumps(values, ensure_ascii=False, sort_keys=True), values)


def _values(data: DataConfig, row: Mapping[str, Any], number: int) -> dict[str, Any] | None:
    """Return the columns of a row that are trained on; None if one of them is empty. Raises ValueError."""
    if data.prompt is not None and data.answer is not None:
        prompt, answer = (as_text(_value(row, column)) for column in (data.prompt, data.answer))
        return {"prompt": prompt, "answer": answer} if prompt and answer else None
    messages = _parsed(_value(row, data.messages))
    if not messages:
        return None
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise ValueError(
            f"data set {data.path}, row {number + 1}: column {data.messages} is no list of messages with a role and a "
            "content; for prompts and answers give data.prompt and data.answer"
        )
    kept = [{name: value for name, value in message.items() if value is not None} for message in messages]
    tools = _parsed(_value(row, data.tools)) if data.tools is not None else None
    return {"messages": kept, "tools": tools} if tools else {"messages": kept}


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column, which may be dotted. Raises ValueError if no row has it."""
    path = column.split(".")
    value = value_at(row, path)
    if value is None:
        check_column(path[0], row)
    return value


def _parsed(value: Any) -> Any:
    """Return the value of a column that may hold its lists as JSON text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _wanted(data: DataConfig) -> str:
    if data.prompt is not None:
        return f"both a prompt ({data.prompt}) and an answer ({data.answer})"
    return f"messages ({data.messages})"
