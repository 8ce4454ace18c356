"""Problems of a data set: in memory, or of a large file each read when it is needed.

    choose()      reads, checks and chooses among all rows
    small, or a form whose rows cannot be read alone (Parquet, Arrow, tables, compressed): every process does that, and
                  keeps the problems
    large file of JSON lines: one process of all that share the cache does that and writes an index (row_index.py). All
                  processes then hold a few numbers, and make a problem from its line again

An index is valid for these files, by size and time of change, and for everything that its key depends on. A problem
whose prompt is not that of the index is an error, so a file that changes during a run is noticed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import version
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload
from zlib import crc32

from megatron_rl.agent.data_rows import DataRow, DataSource, files_of_lines, is_limited
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.agent.row_index import (
    IndexedSet,
    IndexEntry,
    IndexHead,
    RowIndex,
    no_room,
    noted,
    once,
    open_index,
    write_index,
)
from megatron_rl.agent.text_rows import line_at, parse_json
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.files import cache_folder

logger = logging.getLogger(__name__)

LARGE = 64 * 2**20
"""Bytes from which a data set is not kept in memory, where it takes two to five times as much in every process."""
TRIED = 16  # problems of each set that are made when an index is opened, to see that they are still the same
SLOWEST = 1_000_000  # bytes a second that a process reads at least, or others no longer wait for it
OPEN_FILES = 64
RULES = 2
"""Number of the rules by which rows become problems. It rises where they change, so that an older index of the same
version of mrl is not used."""


class Chosen(NamedTuple):
    problem: Problem
    where: str
    place: int | None
    """Beginning of the row's line: `DataRow.place`."""


class Choice(NamedTuple):
    """Problems that are chosen from the rows of a data set."""

    sets: Mapping[str, Sequence[Chosen]]
    columns: Sequence[str] = ()
    """Columns of all rows of the data set, if it is not one of question and answer."""
    dropped: Mapping[str, int] = {}
    lacking: int = 0


class ChosenSets(NamedTuple):
    sets: Mapping[str, Sequence[Problem]]
    dropped: Mapping[str, int]
    """Number of rows that cannot be used, by reason."""
    lacking: int
    """Number of rows without what is asked for."""
    columns: Sequence[str]
    """Columns of all rows, as the choice has them."""


ReadProblem = Callable[[DataRow, Sequence[str]], Problem]
"""Makes the problem of a row that was chosen, given the columns of the choice. Raises ValueError."""


class DataChanged(RuntimeError):
    """A row of a data set is not the one that its index was made of."""


def select(source: DataSource, depends_on: Any, choose: Callable[[], Choice], make: ReadProblem) -> ChosenSets:
    """Return the problems of a data set.

    Args:
        depends_on: all that `choose` depends on except mrl and the files of the source, as JSON.
        make: of a row that was chosen, gives the same problem as `choose` does.

    Raises ValueError as `choose` does.
    """
    files = [] if is_limited() else files_of_lines(source, LARGE)
    if not files:
        return _in_memory(choose())
    size = sum(Path(file).stat().st_size for file in files)
    folder = cache_folder("rows")
    if why := no_room(folder, size // 4):
        logger.warning("data set %s is kept in the memory of every rank: no index in %s: %s", source.path, folder, why)
        return _in_memory(choose())
    identity = _identity(files)
    all_of_it = [version("mrl"), RULES, identity, depends_on]
    key = hashlib.sha256(json.dumps(all_of_it, default=str).encode()).hexdigest()[:32]
    path, lines = folder / f"{key}.rows", RowLines(files)
    load = partial(_load, path, lines, make)

    def build() -> ChosenSets:
        with noted() as notes:
            choice = choose()
        alone = all(each.place is not None for its in choice.sets.values() for each in its)
        if not alone or identity != _identity(files):
            why = "changed while it was read" if alone else "has rows that cannot be read alone"
            logger.warning("data set %s %s: it is kept in memory", source.path, why)
            return _in_memory(choice)
        problems = {name: [each.problem for each in its] for name, its in choice.sets.items()}
        head = IndexHead(
            [_described(name, its) for name, its in problems.items()],
            [*choice.columns],
            dict(choice.dropped),
            choice.lacking,
            notes,
        )
        entries = (_entry(each) for its in choice.sets.values() for each in its)
        return (write_index(path, head, entries) and load(replays=False)) or _in_memory(choice)

    return once(path, 60 + size / SLOWEST, load, build)


class RowLines:
    """RowLines of the files of a data set, by their place."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self._starts = [0, *accumulate(Path(file).stat().st_size for file in files)]
        self._opened = lru_cache(OPEN_FILES)(_binary)

    def problem(self, entry: IndexEntry, make: ReadProblem, columns: Sequence[str]) -> Problem:
        """Make the problem of a row. Raises DataChanged if it is not the one that was chosen, and OSError."""
        number = bisect_right(self._starts, entry.place) - 1
        where = f"{self._files[number]}:{entry.line}"
        file = self._opened(self._files[number])
        try:
            values = parse_json(line_at(file.fileno(), entry.place - self._starts[number]), where)
            if not isinstance(values, Mapping):
                raise ValueError("it is not an object")
            problem = make(DataRow(where, values, entry.place), columns)
            if _check(problem) != entry.check:
                raise ValueError("it gives another prompt or answer")
        except ValueError as error:
            raise DataChanged(f"{where}: the row has changed since the run read it: {error}") from error
        return problem


def _binary(file: str) -> FileIO:
    return Path(file).open("rb", buffering=0)


class IndexedProblems(Sequence[Problem]):
    """Problems that are made when they are asked for."""

    def __init__(self, index: RowIndex, number: int, path: Path, read: Callable[[IndexEntry], Problem]) -> None:
        """number: of the set in the index. path: of the index."""
        self._index, self._number, self._path, self._read = index, number, path, read
        self._its = index.head.sets[number]
        self._first = sum(one.problems for one in index.head.sets[:number])
        self._environment = ""

    def __len__(self) -> int:
        return self._its.problems

    @overload
    def __getitem__(self, at: int) -> Problem: ...
    @overload
    def __getitem__(self, at: slice) -> list[Problem]: ...
    def __getitem__(self, at: int | slice) -> Problem | list[Problem]:
        """Raises DataChanged and OSError."""
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(len(self)))]
        found = self._read(self._index.entry(self._first + range(len(self))[at]))
        return replace(found, environment=self._environment) if self._environment else found

    @property
    def digest(self) -> ProblemDigest:
        return ProblemDigest(len(self), self._its.digest)

    @property
    def longest(self) -> int:
        """Bytes of the longest prompt; 0 if the model sees none."""
        return self._its.longest

    def sizes(self) -> Iterator[int]:
        """Yield the bytes of each prompt; 0 for one that the model does not see."""
        return (entry.size for entry in self._index.entries(self._first, len(self)))

    def of(self, environment: str) -> IndexedProblems:
        found = self._copy(self._index, self._number, self._path)
        found._environment = environment
        return found

    def without(self, why: str, left_out: Callable[[], Collection[int]]) -> Sequence[Problem]:
        """Return the problems but some, by their numbers, which one process computes.

        why: names them, among all that may be left out of this set.
        """
        name = hashlib.sha256(f"{self._its.name}: {why}".encode()).hexdigest()[:8]
        path = self._path.with_name(f"{self._path.stem}-{name}.rows")

        def load() -> Sequence[Problem] | None:
            index = open_index(path)
            return None if index is None else self._copy(index, 0, path)

        def build() -> Sequence[Problem]:
            skipped = left_out()
            kept = [number for number in range(len(self)) if number not in skipped]
            digest = ProblemDigest.of(self[number] for number in kept)
            all_entries = enumerate(self._index.entries(self._first, len(self)))
            entries = [entry for number, entry in all_entries if number not in skipped]
            its = IndexedSet(self._its.name, len(kept), digest.digest, max((each.size for each in entries), default=0))
            head = self._index.head._replace(sets=[its], notes=[])
            return (write_index(path, head, entries) and load()) or [self[number] for number in kept]

        return once(path, 60 + len(self) / 1000, load, build)

    def _copy(self, index: RowIndex, number: int, path: Path) -> IndexedProblems:
        found = IndexedProblems(index, number, path, self._read)
        found._environment = self._environment
        return found


def digest_of(problems: Sequence[Problem]) -> ProblemDigest:
    return problems.digest if isinstance(problems, IndexedProblems) else ProblemDigest.of(problems)


def prompt_bytes(problem: Problem) -> int:
    """Return the bytes of a prompt; 0 if the model does not see it."""
    text = problem.prompt
    if not problem.is_prompt:
        return 0
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _in_memory(choice: Choice) -> ChosenSets:
    sets = {name: [each.problem for each in its] for name, its in choice.sets.items()}
    return ChosenSets(sets, choice.dropped, choice.lacking, choice.columns)


def _described(name: str, problems: Sequence[Problem]) -> IndexedSet:
    return IndexedSet(
        name, len(problems), ProblemDigest.of(problems).digest, max(map(prompt_bytes, problems), default=0)
    )


def _entry(chosen: Chosen) -> IndexEntry:
    assert chosen.place is not None
    line = int(chosen.where.rpartition(":")[2])
    return IndexEntry(chosen.place, line, prompt_bytes(chosen.problem), _check(chosen.problem))


def _check(problem: Problem) -> int:
    # The right answer too: with another one in its place, a run would learn something else in silence.
    golden = json.dumps(dict(problem.golden), sort_keys=True, default=lambda value: type(value).__name__)
    return crc32(f"{problem.prompt}\0{golden}".encode("utf-8", "surrogatepass"))


def _load(path: Path, lines: RowLines, make: ReadProblem, *, replays: bool = True) -> ChosenSets | None:
    """Return the problems of an index; None if it does not exist or cannot be used.

    replays: whether what was logged when the rows were chosen is logged again.
    """
    index = open_index(path)
    if index is None:
        return None
    head = index.head

    read = partial(lines.problem, make=make, columns=head.columns)
    sets = {its.name: IndexedProblems(index, number, path, read) for number, its in enumerate(head.sets)}
    try:
        for its in sets.values():
            _ = its[:: max(1, len(its) // TRIED)]
    except (DataChanged, OSError) as error:
        logger.warning("the index %s cannot be used: %s", path, error)
        return None
    for note in head.notes if replays else ():
        logging.getLogger(note.logger).log(note.level, "%s", note.text)
    return ChosenSets(sets, head.dropped, head.lacking, head.columns)


def _identity(files: Sequence[str]) -> list[tuple[str, int, int]]:
    found = [(os.path.realpath(file), Path(file).stat()) for file in files]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in found]
