"""Problems of a data set: read from this machine, each one once, in the order of the data set."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from megatron_rl.agent.answer_format import FORMATS
from megatron_rl.extras import install_command
from megatron_rl.model.config import is_hub_name
from megatron_rl.section import HubPath, Section

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

BATCH = 10_000
"""Rows read at a time."""

READERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".arrow": "arrow"}
"""Reader of `datasets` by the ending of a file."""


class DataSet(Section):
    """Where problems come from, and where they stand in a row."""

    path: HubPath
    """Name on the hub, such as Maxwell-Jia/AIME_2024, or a file or directory of this machine, a relative one from the
    recipe's file on: Parquet, JSON lines, Arrow, or what `datasets` saved to disk."""
    split: str = "train"
    """Split of a data set that has several."""
    subset: str | None = None
    """Configuration of a data set that has several."""
    question: str = "problem"
    """Column of the problem; a.0.b is the field b of the first element of the list in column a."""
    answer: str = "answer"
    """Column of the right answer, likewise."""
    answer_after: str | None = None
    """Where that column is a worked solution: the answer is what follows the last of these marks, such as ####."""
    answer_boxed: bool = False
    r"""Or it is what is in the last \boxed{} of it."""
    remove: list[str] = []
    """Texts cut out of every question: instructions that contradict ours. Blanks count as equal to line ends."""


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    answer: str


def normalised(text: str) -> str:
    """What makes two questions the same: their words."""
    return " ".join(text.split())


def read_questions(source: DataSet) -> Iterator[Question]:
    """Questions and answers of all rows but those that repeat another to the letter, and those without an answer.

    Raises ValueError for data that is not there or not as `source` says.
    """
    removed = [re.compile(r"\s+".join(map(re.escape, text.split()))) for text in source.remove]
    seen = set()
    for row in _rows(source):
        if row not in seen and None not in row:
            seen.add(row)
            text, answer = map(str, row)
            for pattern in removed:
                text = pattern.sub("", text)
            if found := _answer_in(source, answer):
                yield Question(text.strip(), found)


def _answer_in(source: DataSet, solution: str) -> str | None:
    """None where the solution has no answer."""
    if source.answer_boxed:
        boxed = FORMATS["boxed"].find(solution)
        return None if boxed is None else boxed.text
    if source.answer_after is not None:
        _, mark, solution = solution.rpartition(source.answer_after)
        if not mark:
            return None
    return solution.strip()


def distinct(questions: Iterable[Question]) -> list[Question]:
    """Each question once, with its first answer."""
    first: dict[str, Question] = {}
    contradicted = set()
    for question in questions:
        key = normalised(question.text)
        if first.setdefault(key, question).answer != question.answer:
            contradicted.add(key)
    if contradicted:
        logger.warning("%d problems have several answers: the first one counts", len(contradicted))
    return list(first.values())


def _rows(source: DataSet) -> Iterator[tuple[Any, Any]]:
    """(question, answer) of every row; a few thousand rows are in memory at a time."""
    try:
        # Imported here because they take seconds, and the launcher, which only checks the arguments, lacks them.
        import datasets
        import pyarrow
    except ImportError as error:
        raise ValueError(f"data set {source.path}: needs `{install_command('math')}`: {error}") from error
    datasets.disable_progress_bars()  # a rank's log is no terminal
    try:
        with TemporaryDirectory(prefix="mrl-datasets-") as scratch:
            for batch in _load(source, scratch).with_format("arrow").iter(batch_size=BATCH):
                yield from zip(*(_values(batch, path) for path in (source.question, source.answer)), strict=True)
    except StopIteration as error:  # `datasets` looks for a first row
        raise ValueError(f"data set {source.path}: there is no row in it") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError, pyarrow.ArrowException) as error:
        raise ValueError(f"data set {source.path}: {error}") from error


def _load(source: DataSet, scratch: str) -> Dataset | IterableDataset:
    """The data set, streamed where `datasets` has not saved it: else it would write it anew into its cache, on a file
    system that all ranks share. What it locks and writes even so stays in `scratch`."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    place = _on_this_machine(source.path)
    if place.is_file():
        if place.suffix not in READERS:
            raise ValueError(f"a file ends in {', '.join(READERS)}")
        kind, only = READERS[place.suffix], {source.split: str(place)}
        return load_dataset(kind, data_files=only, split=source.split, cache_dir=scratch, streaming=True)
    if not any((place / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
        return load_dataset(str(place), name=source.subset, split=source.split, cache_dir=scratch, streaming=True)
    saved = load_from_disk(str(place))
    if isinstance(saved, DatasetDict):
        if source.split not in saved:
            raise ValueError(f"there is no split {source.split!r}, only {', '.join(saved)}")
        return saved[source.split]
    return saved


def _on_this_machine(path: str) -> Path:
    """The file or directory of a data set; one of the hub is looked for where `mrl prefetch` puts it (HF_HOME)."""
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
        raise ValueError(f"neither a name on the hub nor a path that begins with / . or ~: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ValueError("not on this machine; `mrl prefetch RECIPE` fetches it where there is internet") from error


def _values(batch: Any, path: str) -> list[Any]:
    """The values at a dotted path in every row of a pyarrow table; lists and structures as JSON."""
    from pyarrow import compute, types

    name, *inner = path.split(".")
    if name not in batch.column_names:
        raise ValueError(f"there is no column {name!r}, only {', '.join(batch.column_names)}")
    column = batch[name]
    for part in inner:
        column = compute.list_element(column, int(part)) if part.isdigit() else compute.struct_field(column, part)
    values: list[Any] = column.to_pylist()
    return [value and json.dumps(value) for value in values] if types.is_nested(column.type) else values
