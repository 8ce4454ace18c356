"""Limit of the rows that are read of each data set, for a look at a recipe's data before its run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import TypeVar

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


def limited(rows: Iterable[T]) -> Iterator[T]:
    """Yield the rows up to the limit of the context; all outside of one."""
    return islice(rows, _most.get())
