"""Ownership of the pages of the key/value cache: reference counts, and a prefix cache of full pages.

A page is a fixed number of slots; a slot holds the keys and values of one token in every layer. A page is free, held by
one or more sequences, or kept: nobody holds it, but it has a name, and a sequence with the same prefix may use it until
the room is needed. The name is a digest of the page's tokens and of all tokens before them. So finding a page proves
that the pages before it match too.

Only full pages have names, and a full page is never written again: a sequence continues in its own page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b


class Pages:
    """The pages of one replica. Needs no tensors and no model."""

    def __init__(self, count: int, tokens: int, *, reusable: bool = True) -> None:
        """
        count: number of pages. tokens: slots in each.
        reusable: whether full pages get names, and are shared with later sequences.
        """
        self.count = count
        self.tokens = tokens
        self._reusable = reusable
        self._holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._kept: dict[int, None] = {}  # in the order of their release
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        return len(self._free) + len(self._kept)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.tokens)

    def take(self, count: int) -> list[int]:
        """Return `count` pages for one holder. Kept pages are taken last, the longest kept first."""
        assert count <= self.available, f"{count} pages of {self.available} were asked for"
        taken = [self._free.pop() if self._free else self._forget_oldest() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            if self._holders[page] == 0:
                del self._kept[page]
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove one holder from each page. The end of a sequence is forgotten before its prefix."""
        for page in reversed(pages):
            assert self._holders[page] > 0, f"page {page} is released more often than it is held"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._free.append(page)

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages, from the first on, that hold a prefix of `tokens`, and add one holder to each."""
        found: list[int] = []
        if self._named:
            for name in self._chain(tokens):
                if (page := self._named.get(name)) is None:
                    break
                found.append(page)
            self.hold(found)
        return found

    def name(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of these `tokens` findable. Of two pages with the same tokens, one is findable."""
        if self._reusable:
            for page, name in zip(pages, self._chain(tokens), strict=False):
                if name not in self._named and page not in self._names:
                    self._named[name] = page
                    self._names[page] = name

    def forget(self) -> None:
        """Forget all names. Pages stay with their holders."""
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
        digest = blake2b(digest_size=16)
        for start in range(0, len(tokens) - self.tokens + 1, self.tokens):
            digest.update(array("q", tokens[start : start + self.tokens]).tobytes())
            yield digest.digest()
