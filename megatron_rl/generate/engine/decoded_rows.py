"""Rows 0..n-1 of one replica: the sample that each decodes, its pages, and when it needs the next one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron_rl.generate.engine.admission import DecodedRow
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.transcript import RowAnswer


class DecodedRows:
    """Iterates over the numbers of the rows. Needs no tensors."""

    # Looking at every row before every step would cost more than the step of a small model, so the page of a row is
    # noted under the number of the step that needs it. Example with pages of 4 tokens: a row starts with 6 cached
    # tokens and 2 pages. The next two steps write its tokens 6 and 7, and the third needs another page: it is due after
    # 2 * 4 - 6 + 1 = 3 steps, and from then on after every 4. A row that ends, or gives way to others, stays noted and
    # is skipped there (`ended`). If its sample starts again, that is another `DecodedRow`, so an old note never gives
    # it a page.

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._rows: dict[int, DecodedRow] = {}
        self._freed: list[int] = []  # rows that ended since the last plan
        self._decoded = 0  # number of decoding steps so far
        self._due: dict[int, list[DecodedRow]] = {}  # decoding step -> rows that need another page for it
        self.followed: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> DecodedRow:
        return self._rows[number]

    def values(self) -> list[DecodedRow]:
        return list(self._rows.values())

    def youngest_first(self) -> list[int]:
        return sorted(self._rows, key=lambda number: self._rows[number].age, reverse=True)

    def add(self, begun: Iterable[DecodedRow]) -> range:
        """Append rows, and return their numbers. Gaps must be closed."""
        first = len(self._rows)
        for number, row in enumerate(begun, first):
            self._fill(number, row)
            self._note_due(row, len(row.pages) * self._pages.tokens - row.cached + 1)
        return range(first, len(self._rows))

    def free(self, numbers: Iterable[int]) -> None:
        """Stop decoding these rows. Their full pages stay findable; the newest token is not in the cache yet."""
        for number in numbers:
            row = self._rows.pop(number)
            row.ended = True
            prompt, answer = row.pending.request.prompt_tokens, row.answer.tokens
            if row.current and len(prompt) + len(answer) > self._pages.tokens:  # else no page is full
                self._pages.name(prompt + answer[:-1], row.pages)
            self._pages.release(row.pages)
            self.followed.discard(number)
            self._freed.append(number)
        if not self._rows:
            self._due.clear()

    def extend(self, answers: Iterable[RowAnswer], version: int) -> None:
        for each in answers:
            self._rows[each.row].answer.extend(each, version)

    def close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows to the numbers of those that ended, so that the rows are 0..n-1 again: (from, to) each."""
        left = len(self._rows)
        movers = [row for row in range(left, left + len(self._freed)) if row in self._rows]
        moves = list(zip(movers, sorted(row for row in self._freed if row < left), strict=True))
        self._freed = []
        for source, target in moves:
            self._fill(target, self._rows.pop(source))
            self.followed.discard(source)
        return moves

    @property
    def pages_due(self) -> int:
        return sum(not row.ended for row in self._due.get(self._decoded + 1, ()))

    def begin_step(self) -> list[tuple[int, int, int]]:
        """Count a decoding step, and return (row, index, page) for each row that needs a page for it."""
        self._decoded += 1
        due = [row for row in self._due.pop(self._decoded, ()) if not row.ended]
        if not due:
            return []
        numbers = {row: number for number, row in self._rows.items()}
        given = []
        for row, page in zip(due, self._pages.take(len(due)), strict=True):
            given.append((numbers[row], len(row.pages), page))
            row.pages.append(page)
            self._note_due(row, self._pages.tokens)
        return given

    def _note_due(self, row: DecodedRow, steps: int) -> None:
        if row.grows:
            self._due.setdefault(self._decoded + steps, []).append(row)

    def _fill(self, number: int, row: DecodedRow) -> None:
        self._rows[number] = row
        if row.followed:
            self.followed.add(number)
