"""The sets of rows of a supervised run: those to train on, and those held out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.indexed_problems import IndexedProblems
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import read_data, rows_of
from megatron_rl.recipe.data import DataConfig

logger = logging.getLogger(__name__)

KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class RowSets:
    """Rows of a run."""

    trained: Sequence[TrainingSet]  # weighted by their rows in the whole run where `total` is known
    held_out: Mapping[str, Sequence[Problem]]  # by the id of the set that they belong to
    unread: Mapping[str, Mapping[str, int]]  # rows that are used for nothing, by id and reason
    total: int | None = None
    """Rows that the whole run trains on, where the sets have epochs; None: the number of its steps decides."""


def open_sets(data: DataConfig, environment: object) -> RowSets:
    """Read all rows of a run, without those of its sets that are held out, by any of them.

    environment: source of worked examples if `data` names no data set.

    Raises ValueError if a set has no rows, or its data does not match the configuration.
    """
    read, unread = _read(data, environment)
    held = {id: found for id, its in data.members.items() if (found := _held_out(its, id, read[id])) is not None}
    keys = frozenset(key_of(row) for rows in held.values() for row in rows)
    trained = []
    for id, rows in read.items():
        kept = _without(rows, keys) if keys else rows
        own = len(held[id]) if data.members[id].holds_out_share else 0
        if equal := len(rows) - own - len(kept):
            unread[id]["it is equal to a held-out row"] = equal
            _check_left(data.members[id], id, equal, len(rows))
        trained.append(TrainingSet(id, 1.0, _named(kept, id)))
    held = {id: _named(rows, id) for id, rows in held.items()}
    if data.sets is None:
        return RowSets(trained, held, unread)
    if not data.counted:
        weights = [one.weight or 1.0 for one in data.sets]
        return RowSets(_weighted(trained, weights), held, unread)
    counts = [round((one.epochs or 0) * len(its.problems)) for one, its in zip(data.sets, trained, strict=True)]
    for one, count in zip(data.sets, counts, strict=True):
        if not count:
            raise ValueError(f"set {one.id!r}: {one.epochs:g} epochs of its rows are less than one row: raise epochs")
    return RowSets(_weighted(trained, counts), held, unread, sum(counts))


def _read(data: DataConfig, environment: object) -> tuple[dict[str, Sequence[Problem]], dict[str, dict[str, int]]]:
    read: dict[str, Sequence[Problem]] = {}
    unread: dict[str, dict[str, int]] = {}
    for id, its in data.members.items():
        if its.path is None:
            read[id], unread[id] = rows_of(its, environment), {}
            continue
        found = read_data(its)
        lacking = {f"it lacks {found.form.wanted}": found.lacking} if found.lacking else {}
        read[id], unread[id] = found.rows, {**found.dropped, **lacking}
    return read, unread


def _held_out(its: DataConfig, id: str, rows: Sequence[Problem]) -> Sequence[Problem] | None:
    """Return the held-out rows of a set; None if it has none."""
    if its.held_out is None:
        return None
    if (elsewhere := its.held_out_rows()) is not None:
        return read_data(its.model_copy(update=dict(elsewhere))).rows
    share = its.held_out.share or 0.0
    found = _chosen(rows, f"the held-out {share:g}", lambda row: _place(row) < share)
    if not found:
        raise ValueError(
            f"{_key_of(id)}.share {share:g} holds out none of {len(rows)} rows: raise it, or name a split or file"
        )
    return found


def _without(rows: Sequence[Problem], held: frozenset[bytes]) -> Sequence[Problem]:
    name = sha256(b"".join(sorted(held))).hexdigest()
    return _chosen(rows, f"not held out: {name}", lambda row: key_of(row) not in held)


def _chosen(rows: Sequence[Problem], why: str, is_kept: Callable[[Problem], bool]) -> Sequence[Problem]:
    """Return some of the rows. why: names them, among all that may be chosen from this set."""

    def others() -> Collection[int]:
        return {number for number, row in enumerate(rows) if not is_kept(row)}

    if isinstance(rows, IndexedProblems):
        return rows.without(why, others)
    return [row for row in rows if is_kept(row)]


def key_of(row: Problem) -> bytes:
    """Return a hash of what is learned of a row."""
    return blake2b(row.prompt.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def _place(row: Problem) -> float:
    """Return a number from 0 to 1 that depends on the text of the row alone, uniform over all texts."""
    return int.from_bytes(key_of(row), "big") / 2 ** (8 * KEY_BYTES)


def _check_left(its: DataConfig, id: str, equal: int, rows: int) -> None:
    """Warn of rows that are equal to held-out rows of another source. Raises ValueError if most are."""
    of = f"set {id!r}" if id else f"data set {its.path}"
    what = f"{of}: {equal:,} of {rows:,} rows are equal to held-out rows of another source"
    if 2 * equal > rows:
        raise ValueError(f"{what}, and few are left to train on: hold out other rows")
    logger.warning("%s: they are not trained on", what)


def _key_of(id: str) -> str:
    return f"data.sets: held_out of set {id!r}" if id else "data.held_out"


def _named(rows: Sequence[Problem], id: str) -> Sequence[Problem]:
    if not id:
        return rows
    return rows.of(id) if isinstance(rows, IndexedProblems) else [replace(row, environment=id) for row in rows]


def _weighted(sets: Sequence[TrainingSet], weights: Sequence[float]) -> list[TrainingSet]:
    return [replace(its, weight=weight) for its, weight in zip(sets, weights, strict=True)]
