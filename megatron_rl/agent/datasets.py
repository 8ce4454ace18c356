"""Questions of a local data set, without exact repeats, in the order of the data set."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from typing import Any

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.agent.data_rows import DataRow, DataSource, check_column, read_rows, root_of
from megatron_rl.agent.text_rows import as_text, value_at
from megatron_rl.recipe.data_files import is_text_file
from megatron_rl.recipe.hub import is_hub_name

logger = logging.getLogger(__name__)

MOST_NAMED = 5


class DataSet(DataSource):
    """A data set, and the columns of its questions and answers."""

    answer: str = "answer"
    """Column of the right answer, in the same notation."""
    answer_after: str | None = None
    """Marker such as ####, if that column is a worked solution: the answer is the text after the last marker."""
    answer_boxed: bool = False
    r"""Whether the answer is the content of the last \boxed{} of a worked solution."""

    @property
    def needed(self) -> list[str]:
        return [root_of(self.question), root_of(self.answer)]


def hub_names(sources: Iterable[DataSource | None]) -> list[str]:
    return sorted({source.path for source in sources if source and is_hub_name(source.path)})


def data_extras(sources: Iterable[DataSource | None]) -> list[str]:
    """Return the extras of mrl that reading the data sets needs: none for text files."""
    return [] if all(is_text_file(source.path) for source in sources if source) else ["data"]


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All columns, if the source names no answer column."""
    source: DataSource | None = field(default=None, compare=False)
    where: str = field(default="", compare=False)
    place: int | None = field(default=None, compare=False)
    """Beginning of the row's line: `DataRow.place`."""
    given: str = field(default="", compare=False)
    """The text before the source's `remove`; empty: the same."""

    @property
    def wordings(self) -> frozenset[str]:
        """Words by each of which another set may have the question."""
        return frozenset(map(normalised, (self.text, self.given or self.text)))


def normalised(text: str) -> str:
    """Return the words of a question: questions with the same words are equal."""
    return " ".join(text.split())


def words_key(text: str) -> bytes:
    """Return a key of the words of a question."""
    return blake2b(normalised(text).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def read_questions(source: DataSource) -> Iterator[Question]:
    """Yield the questions and answers of all rows, except exact repeats and rows without an answer. If the source is
    not a DataSet, yield questions with all columns of their rows.

    Raises ValueError if the data is missing or does not match `source`.
    """
    seen = set()
    rows = lacking = 0
    for question in _answered(source) if isinstance(source, DataSet) else _whole(source):
        rows += 1
        if question is None:
            lacking += 1
        elif (key := (question.text, question.answer, hash(repr(question.row)))) not in seen:
            seen.add(key)
            yield _asked(source, question)
    if 0 < lacking < rows:
        needed = f"a question ({source.question})"
        if isinstance(source, DataSet):
            needed += f" or an answer ({source.answer})"
        logger.warning(
            "data set %s, split %s: %d of %d rows are skipped, because they lack %s",
            *(source.path, source.split, lacking, rows, needed),
        )


def question_of(source: DataSource, row: DataRow, columns: Iterable[str]) -> Question:
    """Return the question of one row that `read_questions` yields.

    columns: names that the questions' rows have. Raises ValueError if the row has no question.
    """
    found = _answered_in(source, row) if isinstance(source, DataSet) else _whole_of(source, row, columns)
    if found is None:
        raise ValueError("it has no question")
    return _asked(source, found)


def _answered(source: DataSet) -> Iterator[Question | None]:
    return (_answered_in(source, row) for row in read_rows(source, source.needed))


def _answered_in(source: DataSet, row: DataRow) -> Question | None:
    found = [value_at(row.values, path.split(".")) for path in (source.question, source.answer)]
    if (not source.structured and any(isinstance(value, dict | list) for value in found)) or _is_talk(found[0]):
        raise ValueError(f"data set {source.path}: {row.where}: {_no_text(source)}")
    text, solution = map(as_text, found)
    answer = None if text is None or solution is None else _answer_in(source, solution)
    return Question(text, answer, where=row.where, place=row.place) if text is not None and answer else None


def _is_talk(question: Any) -> bool:
    return isinstance(question, list) and any(isinstance(each, Mapping) for each in question)


def _whole(source: DataSource) -> Iterator[Question | None]:
    """Yield the question of each row, with all columns of the data set; None if it lacks the question."""
    rows = [*read_rows(source)]
    columns = dict.fromkeys(name for row in rows for name in row.values)
    for column in source.needed:
        check_column(column, columns, f"data set {source.path}")
    for row in rows:
        yield _whole_of(source, row, columns)


def _whole_of(source: DataSource, row: DataRow, columns: Iterable[str]) -> Question | None:
    text = source.text_of(row.values)
    values = {name: row.values.get(name) for name in columns}
    return Question(text, "", values, source, row.where, row.place) if text else None


def _asked(source: DataSource, question: Question) -> Question:
    return replace(question, text=shortened(source, question.text), given=question.text)


def shortened(source: DataSource, text: str) -> str:
    """Return a question without the texts that are to be removed."""
    for removed in source.remove:
        text = _words(removed).sub("", text)
    return text.strip()


@cache
def _words(text: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, text.split())))


def _answer_in(source: DataSet, solution: str) -> str | None:
    if source.answer_boxed:
        boxed = FORMATS["boxed"].find(solution)
        return None if boxed is None else boxed.text
    if source.answer_after is not None:
        _, mark, solution = solution.rpartition(source.answer_after)
        if not mark:
            return None
    return solution.strip()


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Return each question once, with its first answer and row. Warns of rows that are left out though they say
    something else: the question may be taken from a column that is the same in many rows."""
    first: dict[str, Question] = {}
    left_out = 0
    differing: dict[str, None] = {}
    for question in questions:
        kept = first.setdefault(normalised(question.text), question)
        if kept is not question and (columns := _differences(kept, question)):
            left_out += 1
            differing.update(dict.fromkeys(columns))
    if left_out:
        named = [*differing]
        among = ", ".join(named[:MOST_NAMED]) + (", ..." if len(named) > MOST_NAMED else "")
        logger.warning(
            "rows left out because they have the question of an earlier row, with other values (%s): %d; questions "
            "that remain: %d",
            *(among, left_out, len(first)),
        )
    return list(first.values())


def _differences(one: Question, other: Question) -> list[str]:
    if one.answer != other.answer:
        return ["answer"]
    return [name for name in {**one.row, **other.row} if _said(one.row.get(name)) != _said(other.row.get(name))]


def _said(value: Any) -> Any:
    return normalised(value) if isinstance(value, str) else value


def _no_text(source: DataSet) -> str:
    return (
        f"the question ({source.question}) or the answer ({source.answer}) is a list or an object; name the text "
        f"inside it, for example question: {source.question}.0.content for a conversation, or answer: "
        f"{source.answer}.0 for a list of answers"
    )
