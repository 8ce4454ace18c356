"""Rows of a local data set, in the order of the data set, whatever the format of its files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice, starmap
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from megatron_rl.agent.arrow_rows import arrow_rows, file_batches, file_columns
from megatron_rl.agent.text_rows import as_text, holds_lines, text_rows, value_at
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.owned_folders import owned_folder
from megatron_rl.recipe.data_files import COLUMNS, TEXT, data_suffix, is_text_file
from megatron_rl.recipe.extras import needed
from megatron_rl.recipe.hub import is_hub_name
from megatron_rl.recipe.section import HubPath, Section


class DataSource(Section):
    """A data set, and the column of its questions. PATH alone is short for {path: PATH}."""

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

    shorthand = "path"

    @property
    def needed(self) -> list[str]:
        """Columns, without paths inside them, that the data set must have."""
        return [root_of(self.question)] if self.question else []

    def text_of(self, row: Mapping[str, Any]) -> str | None:
        return as_text(value_at(row, self.question.split(".")))


def root_of(path: str) -> str:
    """Return the column of a path such as a.0.b."""
    return path.partition(".")[0]


T = TypeVar("T")

_most: ContextVar[int | None] = ContextVar("rows read of each data set", default=None)


@contextmanager
def first_rows(count: int | None) -> Iterator[None]:
    """Read at most `count` rows of each data set, and draw as many problems, while the context lasts. None: all."""
    token = _most.set(count)
    try:
        yield
    finally:
        _most.reset(token)


def is_limited() -> bool:
    return _most.get() is not None


def limited(rows: Iterable[T]) -> Iterator[T]:
    return islice(rows, _most.get())


class DataRow(NamedTuple):
    where: str
    """Location, such as `data.jsonl:7` or `data.parquet: row 7`."""
    values: Mapping[str, Any]
    """All columns. From a text file without those that the row lacks; else null there."""
    place: int | None = None
    """Byte at which the row's line begins, counted over all files of the data set; None if it cannot be read alone."""


def read_rows(source: DataSource, columns: Sequence[str] | None = None) -> Iterator[DataRow]:
    """Yield all rows in the order of the data set.

    columns: those that the caller reads; rows may have others too. Default: all.

    Raises ValueError if the data is missing, unreadable, or has none of one of the columns.
    """
    found: dict[str, None] = {}
    with _errors_of(source), owned_folder("datasets") as scratch:
        for row in limited(_of_files(_files(source, scratch), columns)):
            found |= dict.fromkeys(row.values)
            yield row
        if not found:
            raise ValueError("it has no rows")
        for name in columns or ():
            check_column(name, found)


def files_of_lines(source: DataSource, least: int) -> list[str]:
    """Return the files of a data set of at least `least` bytes whose rows can be read alone; none if it is smaller or
    has other files. Raises ValueError as `read_rows` does."""
    with _errors_of(source), owned_folder("datasets") as scratch:
        place = _on_this_machine(source.path)
        found = [place] if place.is_file() else place.rglob("*")
        if sum(file.stat().st_size for file in found if is_text_file(file.name)) < least:
            return []  # said without `datasets`, whose import takes seconds
        files = _files(source, scratch)
        large = sum(Path(file).stat().st_size for file in files) >= least
        return files if large and all(is_text_file(file) and holds_lines(file) for file in files) else []


def check_column(name: str, columns: Collection[str], data_set: str = "") -> None:
    """Raise ValueError if the column does not exist. data_set: named by the error."""
    if name not in columns:
        raise ValueError(f"{data_set}: " * bool(data_set) + f"there is no column {name!r}, only {', '.join(columns)}")


@contextmanager
def _errors_of(source: DataSource) -> Iterator[None]:
    try:
        yield
    except StopIteration as error:  # raised by `datasets` for a data set without rows
        raise ValueError(f"data set {source.path}: it has no rows") from error
    except ImportError as error:
        raise ValueError(f"data set {source.path}: needs {needed('data')}: {error}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"data set {source.path}: {error}") from error
    except Exception as error:
        if not type(error).__module__.startswith(("datasets", "pyarrow")):
            raise
        raise ValueError(f"data set {source.path}: {error}") from error


def _of_files(files: Sequence[str], columns: Sequence[str] | None) -> Iterator[DataRow]:
    first = 0
    for file in files:
        if is_text_file(file):
            for where, values, offset in text_rows(file):
                yield DataRow(where, values, None if offset is None else first + offset)
            first += Path(file).stat().st_size
            continue
        for name in columns or ():
            check_column(name, file_columns(file))
        yield from starmap(DataRow, arrow_rows(file_batches(file, columns), file))


def _files(source: DataSource, scratch: Path) -> list[str]:
    """Return the files of a data set: text or Arrow columns.

    scratch: directory for files and locks that `datasets` writes.
    """
    place = _on_this_machine(source.path)
    if place.is_file():
        if data_suffix(place.name) not in (*COLUMNS, *TEXT):
            raise ValueError(f"unknown file type: supported are {', '.join([*COLUMNS, *TEXT])}")
        return [str(place)]
    if (splits := place / "dataset_dict.json").exists():
        _check_split(source.split, _saved(splits, "splits", str))
        place /= source.split
    if (saved := place / "state.json").exists():
        return [str(place / str(one.get("filename"))) for one in _saved(saved, "_data_files", dict)]
    if (script := place / f"{place.name}.py").exists():  # datasets before 4 offers to run it
        raise ValueError(f"{script.name} is a script, which is never run: write the rows as Parquet or JSON lines")
    # Imported here because it takes seconds; the launcher, which only checks the arguments, does not have it.
    import datasets

    datasets.disable_progress_bars()  # a rank's log is not a terminal
    builder = datasets.load_dataset_builder(str(place), name=source.subset, cache_dir=str(scratch))
    files = builder.config.data_files
    if builder.name not in ("json", "csv", "parquet", "arrow"):
        raise ValueError(f"its files are of the kind {builder.name}: write them as Parquet or JSON lines")
    _check_split(source.split, files)
    found = list(files[source.split])
    _check_shards(found)
    return found


def _saved(file: Path, key: str, kind: type) -> list[Any]:
    """Return the list at a key of a file that `save_to_disk` writes. Raises ValueError and OSError."""
    try:
        found = bounded_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): save the data set again") from error
    items = found.get(key) if isinstance(found, dict) else None
    if not isinstance(items, list) or not all(isinstance(each, kind) for each in items):
        raise ValueError(f"{file} has no list {key}, which `save_to_disk` writes: save the data set again")
    return items


def _check_split(split: str, splits: Collection[str]) -> None:
    if split not in splits:
        raise ValueError(f"there is no split {split!r}, only {', '.join(map(str, splits))}")


def _check_shards(files: Sequence[str]) -> None:
    """Raise ValueError if a file is missing that the names of the others count, as train-00000-of-00003.parquet does: a
    copy that was interrupted would train on a part of the data set."""
    present: dict[tuple[str, ...], set[int]] = {}
    for file in files:
        if shard := re.match(r"(.*-)([0-9]{5})-of-([0-9]{5})(?![0-9])", file):
            present.setdefault(shard.group(1, 3), set()).add(int(shard[2]))
    for (before, count), numbers in present.items():
        for number in range(int(count)):
            if number not in numbers:
                raise ValueError(f"{before}{number:05}-of-{count} is missing: copy the data set again")


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
