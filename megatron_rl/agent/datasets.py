"""Questions of a local data set, without exact repeats, in the order of the data set."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.agent.text_rows import SUFFIXES, as_text, text_rows, value_at
from megatron_rl.model.config import is_hub_name
from megatron_rl.recipe.extras import install_command
from megatron_rl.recipe.section import HubPath, Section

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

Found: TypeAlias = "Dataset | IterableDataset | list[str]"
"""An opened data set, or the paths of its text files."""

BATCH = 10_000
"""Rows read at a time."""

READERS = {".parquet": "parquet", ".arrow": "arrow"}
"""Reader of `datasets` by the suffix of a binary file."""


class Source(Section):
    """A data set, and the column of its questions."""

    structured: ClassVar[bool] = False
    """Whether question and answer may be lists and objects, which are read as JSON."""

    path: HubPath
    """Name on the hub, such as Maxwell-Jia/AIME_2024, or a local file or directory, relative to the recipe's file:
    Parquet, JSON lines, CSV, Arrow, or the output of `save_to_disk` of `datasets`."""
    split: str = "train"
    """Split to read."""
    subset: str | None = None
    """Configuration to read, if the data set has several."""
    question: str = "problem"
    """Column of the problem; a.0.b is the field b of the first element of the list in column a."""
    remove: list[str] = []
    """Texts to remove from every question, such as instructions that contradict ours. Any white space matches any
    other."""


class DataSet(Source):
    """A data set, and the columns of its questions and answers."""

    answer: str = "answer"
    """Column of the right answer, in the same notation."""
    answer_after: str | None = None
    """Marker such as ####, if that column is a worked solution: the answer is the text after the last marker."""
    answer_boxed: bool = False
    r"""Whether the answer is the content of the last \boxed{} of a worked solution."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """All columns, if the source names no answer column."""
    source: Source | None = field(default=None, compare=False)
    """Data set of the question, if it names no answer column."""


def normalised(text: str) -> str:
    """Return the words of a question: questions with the same words are equal."""
    return " ".join(text.split())


def read_questions(source: Source) -> Iterator[Question]:
    """Yield the questions and answers of all rows, except exact repeats and rows without an answer. If the source is
    not a DataSet, yield questions with all columns of their rows.

    Raises ValueError if the data is missing or does not match `source`.
    """
    removed = [re.compile(r"\s+".join(map(re.escape, text.split()))) for text in source.remove]
    seen = set()
    rows = lacking = 0
    with _opened(source) as found:
        for question in _answered(source, found) if isinstance(source, DataSet) else _whole(source, found):
            rows += 1
            if question is None:
                lacking += 1
            elif (question.text, question.answer) not in seen:
                seen.add((question.text, question.answer))
                yield replace(question, text=_without(removed, question.text))
    if 0 < lacking < rows:
        needed = f"a question ({source.question})"
        if isinstance(source, DataSet):
            needed += f" or an answer ({source.answer})"
        logger.warning(
            "data set %s, split %s: %d of %d rows are skipped, because they lack %s",
            *(source.path, source.split, lacking, rows, needed),
        )


def read_rows(source: Source) -> Iterator[Mapping[str, Any]]:
    """Yield all rows with all columns, in the order of the data set. Raises ValueError if the data is missing."""
    with _opened(source) as found:
        yield from _rows(found)


def _rows(found: Found) -> Iterator[Mapping[str, Any]]:
    return (row for file in found for _, row in text_rows(file)) if isinstance(found, list) else iter(found)


def _answered(source: DataSet, found: Found) -> Iterator[Question | None]:
    """Yield the question and answer of each row; None if it lacks one of them."""
    for text, solution in _of_text(source, found) if isinstance(found, list) else _of_arrow(source, found):
        answer = None if text is None or solution is None else _answer_in(source, solution)
        yield Question(text, answer) if text is not None and answer else None


def _whole(source: Source, found: Found) -> Iterator[Question | None]:
    """Yield the question of each row, with all columns; None if it lacks the question."""
    path = source.question.split(".")
    for row in _rows(found):
        text = as_text(value_at(row, path))
        if not text:
            check_column(path[0], row)
        yield Question(text, "", row, source) if text else None


def _without(removed: Sequence[re.Pattern[str]], text: str) -> str:
    for pattern in removed:
        text = pattern.sub("", text)
    return text.strip()


def _answer_in(source: DataSet, solution: str) -> str | None:
    """Return the answer of a solution; None if it has none."""
    if source.answer_boxed:
        boxed = FORMATS["boxed"].find(solution)
        return None if boxed is None else boxed.text
    if source.answer_after is not None:
        _, mark, solution = solution.rpartition(source.answer_after)
        if not mark:
            return None
    return solution.strip()


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Return each question once, with its first answer."""
    first: dict[str, Question] = {}
    contradicted = set()
    for question in questions:
        key = normalised(question.text)
        if first.setdefault(key, question).answer != question.answer:
            contradicted.add(key)
    if contradicted:
        logger.warning("%d problems have several answers: the first one is used", len(contradicted))
    return list(first.values())


@contextmanager
def _opened(source: Source) -> Iterator[Found]:
    """Open a data set with `_load`, and turn errors of reading it into ValueError."""
    try:
        # Imported here because it takes seconds; the launcher, which only checks the arguments, does not have them.
        import datasets
        import pyarrow
    except ImportError as error:
        raise ValueError(f"data set {source.path}: needs `{install_command('math')}`: {error}") from error
    datasets.disable_progress_bars()  # a rank's log is not a terminal
    try:
        with TemporaryDirectory(prefix="mrl-datasets-") as scratch:
            yield _load(source, scratch)
    except StopIteration as error:  # raised by `datasets` for a data set without rows
        raise ValueError(f"data set {source.path}: it has no rows") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
        raise ValueError(f"data set {source.path}: {error}") from error


def _of_text(source: DataSet, files: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Yield question and answer of the rows of JSON or CSV files. A row may lack a column that other rows have."""
    paths = [path.split(".") for path in (source.question, source.answer)]
    columns: dict[str, None] = {}
    for file in files:
        for where, row in text_rows(file):
            columns |= dict.fromkeys(row)
            found = [value_at(row, path) for path in paths]
            if not source.structured and any(isinstance(value, dict | list) for value in found):
                raise ValueError(f"{where}: {_no_text(source)}")
            question, answer = map(as_text, found)
            yield question, answer
    if not columns:
        raise ValueError("it has no rows")
    for name, *_ in paths:
        check_column(name, columns)


def _of_arrow(source: DataSet, found: Dataset | IterableDataset) -> Iterator[tuple[str | None, str | None]]:
    paths = (source.question, source.answer)
    for batch in found.with_format("arrow").iter(batch_size=BATCH):
        yield from zip(*(_values(batch, path, source) for path in paths), strict=True)


def check_column(name: str, columns: Collection[str]) -> None:
    """Raise ValueError if there is no column of this name."""
    if name not in columns:
        raise ValueError(f"there is no column {name!r}, only {', '.join(columns)}")


def _no_text(source: DataSet) -> str:
    return (
        f"the question ({source.question}) or the answer ({source.answer}) is a list or an object; name the text "
        f"inside it, for example question: {source.question}.0.content for a conversation, or answer: "
        f"{source.answer}.0 for a list of answers"
    )


def _load(source: Source, scratch: str) -> Found:
    """Return the data set, or the paths of its text files.

    Data is streamed unless `datasets` saved it to disk: otherwise `datasets` would write it again to its cache, on a
    file system shared by all ranks. The files and locks that it writes anyway go to `scratch`.
    """
    from datasets import DatasetDict, load_dataset, load_dataset_builder, load_from_disk

    place = _on_this_machine(source.path)
    if place.is_file():
        if place.suffix in SUFFIXES:
            return [str(place)]
        if place.suffix not in READERS:
            raise ValueError(f"unknown file type: supported are {', '.join([*READERS, *SUFFIXES])}")
        kind, only = READERS[place.suffix], {source.split: str(place)}
        return load_dataset(kind, data_files=only, split=source.split, cache_dir=scratch, streaming=True)
    if not any((place / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        builder = load_dataset_builder(str(place), name=source.subset, cache_dir=scratch)
        if builder.name not in ("json", "csv"):
            return builder.as_streaming_dataset(split=source.split)
        files = builder.config.data_files
        _check_split(source.split, files)
        return list(files[source.split])
    saved = load_from_disk(str(place))
    if isinstance(saved, DatasetDict):
        _check_split(source.split, saved)
        return saved[source.split]
    return saved


def _check_split(split: str, splits: Collection[str]) -> None:
    if split not in splits:
        raise ValueError(f"there is no split {split!r}, only {', '.join(map(str, splits))}")


def _on_this_machine(path: str) -> Path:
    """Return the file or directory of a data set. A data set on the hub is expected where `mrl prefetch` stores it
    (HF_HOME)."""
    if not is_hub_name(path):
        place = Path(path).expanduser()
        if not place.exists():
            raise ValueError("no such file or directory")
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
    except HFValidationError as error:
        raise ValueError(f"neither a name on the hub nor a path that begins with /, . or ~: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ValueError(
            "not on this machine; `mrl prefetch RECIPE` fetches it on a host with internet access"
        ) from error


def _values(batch: Any, path: str, source: DataSet) -> list[str | None]:
    """Return the texts at a dotted path in every row of a pyarrow table; None for rows without a value, for example if
    a list is too short."""
    from pyarrow import compute, types

    name, *inner = path.split(".")
    check_column(name, batch.column_names)
    column = batch[name]
    for part in inner:
        if part.isdecimal():  # list_element fails if any list is too short; a slice of fixed size is padded with nulls
            element = compute.list_slice(column, int(part), int(part) + 1, return_fixed_size_list=True)
            column = compute.list_element(element, 0)
        else:
            column = compute.struct_field(column, part)
    if not types.is_nested(column.type):
        return [None if value is None else str(value) for value in column.to_pylist()]
    if not source.structured:
        raise ValueError(_no_text(source))
    return [None if value is None else json.dumps(value) for value in column.to_pylist()]
