"""Rows of supervised training: read from a data set, or the worked examples of an environment, and turned into tokens.

A row is a `Problem`, so that the prompt stream, the digests and the record treat rows as they treat problems.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from itertools import chain, islice
from typing import Any, NamedTuple

from megatron_rl.agent.api import Demonstrator, Environment
from megatron_rl.agent.data_rows import DataRow, DataSource, check_column, read_rows
from megatron_rl.agent.dropped_rows import CHECKED, DroppedRows
from megatron_rl.agent.indexed_problems import Choice, Chosen, select
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.row_forms import Form, columns_of, conversation_in, form_of, row_of
from megatron_rl.model.chat.chat import Chat, ExampleWriter
from megatron_rl.model.chat.conversation import Conversation, conversation_of
from megatron_rl.model.chat.messages import Example
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.data import DataConfig
from megatron_rl.recipe.errors import ConfigurationError

logger = logging.getLogger(__name__)

ROWS = ""  # set of all rows

TRIED = 64  # rows that are turned into tokens at the start: the first ones, and others from the whole set


class UnusableRow(ValueError):
    """A row that cannot be trained on."""


HELD_OUT = "held out"  # set of the rows that are held out

EQUAL = "it is equal to a held-out row"
KEY_BYTES = 8


def key_of(row: Problem) -> bytes:
    """Return a hash of what is learned of a row."""
    return blake2b(row.prompt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


class Sides(NamedTuple):
    """Decides which rows are held out, by their text alone."""

    share: float = 0.0  # share of the rows that are held out
    taken: frozenset[bytes] = frozenset()  # keys of rows that are held out elsewhere

    def of(self, row: Problem) -> str:
        """Return ROWS, HELD_OUT, or EQUAL if the row is used for nothing."""
        if not self.share and not self.taken:
            return ROWS
        key = key_of(row)
        if int.from_bytes(key, "big") < self.share * 2 ** (8 * KEY_BYTES):
            return HELD_OUT
        return EQUAL if key in self.taken else ROWS

    def check(self, name: str, equal: int, rows: int) -> None:
        """Warn of rows of a set that are equal to held-out ones. Raises ValueError if most are."""
        what = f"{name}: {equal:,} of {rows:,} rows are equal to held-out rows of another source"
        if 2 * equal > rows:
            raise ValueError(f"{what}, and few are left to train on: hold out other rows")
        if equal:
            logger.warning("%s: they are not trained on", what)

    @property
    def as_json(self) -> list[Any]:
        return [self.share, sha256(b"".join(sorted(self.taken))).hexdigest()] if self.share or self.taken else []


ALL_TRAINED = Sides()


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
    try:
        return [*read_data(data).rows]
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


@dataclass(frozen=True, slots=True)
class DataRows:
    form: Form
    rows: Sequence[Problem]
    held_out: Sequence[Problem]
    dropped: Mapping[str, int]
    lacking: int  # rows without a value in a column that is trained on
    unread: Sequence[str]  # columns that nothing reads


def read_data(data: DataConfig, sides: Sides = ALL_TRAINED) -> DataRows:
    """Read the rows of `data.path`, and warn of those that are not trained on. sides: which of them are held out.

    Raises ValueError if the data is missing or does not match the configuration, or if one of the first rows or most of
    them cannot be understood.
    """
    assert data.path is not None
    source = DataSource(path=data.path, split=data.split, subset=data.subset)
    rows = read_rows(source)
    first = [*islice(rows, CHECKED)]
    try:
        form = form_of(data, dict.fromkeys(chain.from_iterable(row.values for row in first)))
    except ValueError as error:
        raise ValueError(f"data set {source.path}: {error}") from error

    def made(row: DataRow, _: Sequence[str]) -> Problem:
        values = row_of(form, row.values)
        if values is None:
            raise ValueError(f"it has no {form.wanted}")
        return _row(values, row.where)

    def choose() -> Choice:
        return _choose(source, form, chain(first, rows), sides)

    columns = data.model_dump(mode="json", include={"messages", "tools", "prompt", "answer"})
    found = select(source, ["supervised", source.model_dump(), columns, *sides.as_json], choose, made)
    trained, held_out = (found.sets.get(side, ()) for side in (ROWS, HELD_OUT))
    return DataRows(form, trained, held_out, found.dropped, found.lacking, form.unread(found.columns))


def _choose(source: DataSource, form: Form, rows: Iterable[DataRow], sides: Sides) -> Choice:
    columns: dict[str, None] = {}
    of_sides: dict[str, list[Chosen]] = {ROWS: [], HELD_OUT: [], EQUAL: []}
    dropped, lacking = DroppedRows(source.path), 0
    for number, row in enumerate(rows):
        columns |= dict.fromkeys(row.values)
        try:
            values = row_of(form, row.values)
        except ValueError as error:
            dropped.add(number, row.where, error)
            continue
        if values is None:
            lacking += 1
        else:
            problem = _row(values, row.where)
            of_sides[sides.of(problem)].append(Chosen(problem, row.where, row.place))
    name = f"data set {source.path}"
    logger.info("%s: %s", name, form.described(columns))
    for column in columns_of(form):
        check_column(column, columns, name)
    usable, equal = sum(map(len, of_sides.values())), len(of_sides.pop(EQUAL))
    count = usable + lacking + sum(dropped.by_reason.values())
    dropped.report(count)
    if not usable:
        raise ValueError(f"{name}, split {source.split}: no row has {form.wanted}")
    if lacking:
        logger.warning(
            "%s, split %s: %d of %d rows are skipped, because they lack %s",
            *(name, source.split, lacking, count, form.wanted),
        )
    sides.check(name, equal, usable)
    by_reason = dropped.by_reason | ({EQUAL: equal} if equal else {})
    return Choice({id: its for id, its in of_sides.items() if its}, [*columns], by_reason, lacking)


def demonstrations(environment: object) -> Sequence[tuple[str, str]]:
    return environment.demonstrations() if isinstance(environment, Demonstrator) else []


def _gold_responses(environment: object) -> Sequence[tuple[str, str]]:
    if not isinstance(environment, Environment):
        return []
    problems = [problem for each in environment.training_sets() for problem in each.problems if problem.is_prompt]
    try:
        return [(problem.prompt, environment.gold_response(problem)) for problem in problems]
    except NotImplementedError:
        return []


def token_example(prompt: str, answer: str, tokenizer: Tokenizer) -> Example:
    asked, answered = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_id]
    return Example(asked + answered, [False] * len(asked) + [True] * len(answered))


class RowEncoder:
    def __init__(self, data: DataConfig, tokenizer: Tokenizer, longest: int) -> None:
        self._data, self._tokenizer, self._longest = data, tokenizer, longest
        self._chat = Chat(tokenizer, data.chat_template)
        self._examples = ExampleWriter(self._chat)
        self._systems = {id: its.system for id, its in data.members.items()}

    def example(self, row: Problem) -> Example:
        try:
            found = self._encoded(row.golden, self._systems[row.environment])
        except ValueError as error:
            raise UnusableRow(str(error)) from error
        if len(found.tokens) > self._longest:
            raise UnusableRow(TOO_LONG)
        if not any(found.loss_mask[1:]):
            raise UnusableRow("it has no token to learn: no message is the assistant's, or its answer is empty")
        return found._replace(loss_mask=[False, *found.loss_mask[1:]])

    def check(self, rows: Sequence[Problem]) -> None:
        """Raise ConfigurationError if one of the first rows cannot be turned into tokens, unless it is too long, or if
        most rows of a sample of all cannot be trained on."""
        spread = range(CHECKED, len(rows), max(1, -(-(len(rows) - CHECKED) // (TRIED - CHECKED))))
        tried = [*range(min(CHECKED, len(rows))), *spread][:TRIED]
        reasons: Counter[str] = Counter()
        for number in tried:
            try:
                self.example(rows[number])
            except UnusableRow as error:
                if str(error) != TOO_LONG and number < CHECKED:
                    where = f"data: {place_of(rows[number], number)} cannot be trained on: "
                    of_recipe = str(error).startswith("data.")  # a key is to blame, not the row
                    raise ConfigurationError(f"{'' if of_recipe else where}{error}") from error
                reasons[str(error)] += 1
        if reasons.total() * 2 > len(tried):
            why = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
            raise ConfigurationError(f"data: {reasons.total()} of {len(tried)} rows tried cannot be trained on: {why}")

    def _encoded(self, values: Mapping[str, Any], system: str | None) -> Example:
        if values.get("plain"):  # the environment has already put the prompt into the chat template
            return token_example(values["prompt"], values["answer"], self._tokenizer)
        chat, talk = self._data.chat, "messages" in values
        if talk and chat == "never":
            raise ValueError("data.chat is never, and only the chat template can write a list of messages")
        if talk or chat == "always" or (chat == "auto" and self._chat.has_template):
            return self._talk(values, system)
        if system is not None or self._data.chat_template or "system" in values:
            raise ValueError("there is a system message or data.chat_template, but the tokenizer has no chat template")
        return token_example(self._tokenizer.as_prompt(values["prompt"]), values["answer"], self._tokenizer)

    def _talk(self, values: Mapping[str, Any], system: str | None) -> Example:
        talk = _conversation(values)
        if system is None or any(message["role"] == "system" for message in talk.messages):
            return self._examples.example(talk)
        first = conversation_of([{"role": "system", "content": system}], field="data.system")
        try:
            return self._examples.example(first + talk)
        except ValueError as error:
            self._examples.example(talk)  # raises where the row is to blame
            raise ValueError(
                "data.system: the model's chat template does not take a system message "
                f"({error.__cause__ or error}); leave it out"
            ) from error


def _conversation(values: Mapping[str, Any]) -> Conversation:
    if "messages" in values:
        return conversation_in(values)
    system = [{"role": "system", "content": values["system"]}] if "system" in values else []
    turns = [{"role": "user", "content": values["prompt"]}, {"role": "assistant", "content": values["answer"]}]
    return conversation_of([*system, *turns])


TOO_LONG = "it is longer than training.sequence_length"


def place_of(row: Problem, number: int) -> str:
    """Return the location of a row in its file, or its number, from 0, among all rows."""
    return str(row.golden.get("where") or f"row {number + 1}")


def _row(values: Mapping[str, Any], where: str = "") -> Problem:
    """Make a row, whose text is that of its values: the digest of the rows covers all that is learned."""
    text = json.dumps(values, ensure_ascii=False, sort_keys=True)
    return Problem(text, {**values, "where": where} if where else values)
