"""The sets of rows of a supervised run: those to train on, and those held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.indexed_problems import IndexedProblems
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.supervised.example_rows import EQUAL, HELD_OUT, ROWS, Sides, key_of, read_data, rows_of
from megatron_rl.recipe.data import DataConfig


@dataclass(frozen=True, slots=True)
class RowSets:
    """Rows of a run."""

    trained: Sequence[TrainingSet]  # weighted by their rows in the whole run where `total` is known
    held_out: Mapping[str, Sequence[Problem]]  # by the id of the set that they belong to
    unread: Mapping[str, Mapping[str, int]]  # rows that are used for nothing, by id and reason
    total: int | None = None
    """Rows that the whole run trains on, where the sets have epochs; None: the number of its steps decides."""
    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)  # columns that nothing reads, by id


def open_sets(data: DataConfig, environment: object) -> RowSets:
    """Read all rows of a run. No row is trained on that is equal to a held-out one of any set.

    environment: source of worked examples if `data` names no data set.

    Raises ValueError if a set has no rows, or its data does not match the configuration.
    """
    members = data.members
    held: dict[str, Sequence[Problem]] = {
        id: read_data(its.model_copy(update=dict(elsewhere))).rows
        for id, its in members.items()
        if (elsewhere := its.held_out_rows()) is not None
    }
    taken = {key_of(row) for rows in held.values() for row in rows}
    read: dict[str, Sequence[Problem]] = {}
    unread: dict[str, Mapping[str, int]] = {}
    ignored: dict[str, Sequence[str]] = {}
    # A row that a set with a large share holds out may be in one with a small share, which does not hold it out. So the
    # small one is read later, when the held-out rows of the large one are known. The other way round, both hold it out.
    for id, its in sorted(members.items(), key=lambda one: -one[1].held_out_share):
        found, unread[id], ignored[id] = _read(its, environment, Sides(its.held_out_share, frozenset(taken)))
        read[id] = found[ROWS]
        if its.held_out_share:
            held[id] = found[HELD_OUT]
            taken |= {key_of(row) for row in held[id]}
        _check(id, its, len(read[id]), len(held.get(id, ())))
    named = {id: _named(rows, id) for id, rows in held.items()}
    trained = [TrainingSet(id, 1.0, _named(read[id], id)) for id in members]
    if data.sets is None:
        return RowSets(trained, named, unread, ignored=ignored)
    if not data.counted:
        weighted = _weighted(trained, [one.weight or 1.0 for one in data.sets])
        return RowSets(weighted, named, unread, ignored=ignored)
    counts = [round((one.epochs or 0) * len(its.problems)) for one, its in zip(data.sets, trained, strict=True)]
    for one, count in zip(data.sets, counts, strict=True):
        if not count:
            raise ValueError(f"set {one.id!r}: {one.epochs:g} epochs of its rows are less than one row: raise epochs")
    return RowSets(_weighted(trained, counts), named, unread, sum(counts), ignored)


def _read(
    its: DataConfig, environment: object, sides: Sides
) -> tuple[Mapping[str, Sequence[Problem]], Mapping[str, int], Sequence[str]]:
    """Return the rows of a set by their side, the number of those that are used for nothing, by reason, and the columns
    that nothing reads."""
    if its.path is not None:
        found = read_data(its, sides)
        lacking = {f"it lacks {found.form.wanted}": found.lacking} if found.lacking else {}
        return {ROWS: found.rows, HELD_OUT: found.held_out}, {**found.dropped, **lacking}, found.unread
    of_sides: dict[str, list[Problem]] = {ROWS: [], HELD_OUT: [], EQUAL: []}
    for row in rows_of(its, environment):
        of_sides[sides.of(row)].append(row)
    equal = len(of_sides.pop(EQUAL))
    sides.check("the worked examples", equal, equal + sum(map(len, of_sides.values())))
    return of_sides, {EQUAL: equal} if equal else {}, ()


def _check(id: str, its: DataConfig, trained: int, held: int) -> None:
    """Raise ValueError if a set has no row to train on, or its share holds out none."""
    key = f"held_out of set {id!r} in data.sets" if id else "data.held_out"
    if its.held_out_share and not held:
        raise ValueError(
            f"{key}.share {its.held_out_share:g} holds out none of {trained:,} rows: raise it, or name a split or file"
        )
    if not trained:
        raise ValueError(f"{key} leaves no row to train on: hold out fewer rows")


def _named(rows: Sequence[Problem], id: str) -> Sequence[Problem]:
    if not id:
        return rows
    return rows.of(id) if isinstance(rows, IndexedProblems) else [replace(row, environment=id) for row in rows]


def _weighted(sets: Sequence[TrainingSet], weights: Sequence[float]) -> list[TrainingSet]:
    return [replace(its, weight=weight) for its, weight in zip(sets, weights, strict=True)]
