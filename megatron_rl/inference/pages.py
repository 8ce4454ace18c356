"""Which page of the key/value cache is whose: reference counts, and full pages that are found again by what they hold.

A page is a fixed number of places, one token's keys and values of every layer in each. It is free, held by one or
several sequences, or kept: nobody holds it, but it has a name, and who begins with the same tokens may have it until
its room is needed. Its name is a digest of its tokens and of all before them, so a page that is found proves that those
before it are the same too.

Only full pages have names, and nobody writes to a full page: a sequence that goes on does so in a page of its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class Pages:
    """The pages of one replica. Knows no tensor and no model."""

    def __init__(self, count: int, tokens: int, *, found_again: bool = True) -> None:
        """
        count: pages that there are. tokens: places in each.
        found_again: whether full pages get names.
        """
        self.count = count
        self.tokens = tokens
        self._found_again = found_again
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._kept: dict[int, None] = {}  # in the order in which they were let go
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        """Pages that nobody holds, the kept among them."""
        return len(self._free) + len(self._kept)

    def needed(self, tokens: int) -> int:
        """Pages for a sequence of so many tokens."""
        return -(-tokens // self.tokens)

    def take(self, count: int) -> list[int]:
        """So many pages, for one holder; of the kept the one that was let go first loses its name first."""
        assert count <= self.available, f"{count} pages of {self.available} were asked for"
        taken = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """One more holder of each."""
        for page in pages:
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder of each less. The last ones of a sequence are forgotten before those that they go on from."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is released more often than it is held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """The pages, from the first one on, that hold what `tokens` begins with, and one more holder of each."""
        found: list[int] = []
        if self._named:
            for name in self._chain(tokens):
                if (page := self._named.get(name)) is None:
                    break
                found.append(page)
            self.hold(found)
        return found

    def name(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Have the full ones of the `pages` that hold `tokens` found again. Of two with the same tokens one is."""
        if self._found_again:
            for page, name in zip(pages, self._chain(tokens), strict=False):
                if name not in self._named and page not in self._names:
                    self._named[name] = page
                    self._names[page] = name

    def forget(self) -> None:
        """No page is found any more; they remain with those that hold them."""
        self._named.clear()
        self._names.clear()
        self._free.extend(reversed(self._kept))
        self._kept.clear()

    def _forget_oldest(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page]
        del self._named[self._names.pop(page)]
        return page

    def _chain(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """The name of each full page of a sequence."""
        digest = blake2b(digest_size=16)
        for start in range(0, len(tokens) - self.tokens + 1, self.tokens):
            digest.update(array("q", tokens[start : start + self.tokens]).tobytes())
            yield digest.digest()
