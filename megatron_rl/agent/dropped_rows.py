"""Rows of a data set that cannot be used: an error if they are among the first or the most, otherwise counted."""

from __future__ import annotations

import logging
import re
from collections import Counter

logger = logging.getLogger(__name__)

CHECKED = 16
"""Rows at the start of a data set that must all be usable: an unusable one there probably stands for most."""
SHOWN = 5


class DroppedRows:
    def __init__(self, path: str) -> None:
        self._path = path
        self._count: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, number: int, where: str, error: ValueError) -> None:
        """Count a row. number: of the row, from 0. where: its location. Raises ValueError for one of the first rows."""
        if number < CHECKED:
            named = where if where.startswith(self._path) else f"{self._path}: {where}"
            raise ValueError(f"data set {named}: {error}") from error
        reason = re.sub(r"(?<=\.)\d+(?=[.:])", "N", str(error))  # messages.3.role: one reason for all messages
        self._count[reason] += 1
        self._first.setdefault(reason, where)

    @property
    def by_reason(self) -> dict[str, int]:
        return dict(self._count.most_common())

    def report(self, rows: int) -> None:
        """Warn of dropped rows. rows: of the data set, dropped ones included. Raises ValueError if most are dropped."""
        dropped = self._count.total()
        if not dropped:
            return
        reasons = [
            f"{count:,} x {reason} (first: {self._first[reason]})" for reason, count in self._count.most_common(SHOWN)
        ]
        what = (
            f"data set {self._path}: {dropped:,} of {rows:,} rows cannot be used and are dropped: {'; '.join(reasons)}"
        )
        if dropped * 2 > rows:
            raise ValueError(what)
        logger.warning("%s", what)
