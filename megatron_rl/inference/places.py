"""Where in the cache the tokens of a prefill go, and which of them they see: pure, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_rl.inference.plans import Prefill


def places_written(prefills: Sequence[Prefill], page_tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[copied] tokens of the prefills, packed one after the other, and [copied] the place of each.

    A token of a full page has one, any other one in the page of each row.
    """
    runs: list[tuple[int, int, int]] = []  # first packed token, first place, tokens
    packed = 0
    for prefill in prefills:
        full = len(prefill.pages) * page_tokens
        stop = prefill.start + len(prefill.tokens)
        for number in range(prefill.start // page_tokens, len(prefill.pages)):
            first = number * page_tokens
            runs.append((packed + first - prefill.start, prefill.pages[number] * page_tokens, page_tokens))
        if stop > full:
            runs += [(packed + full - prefill.start, page * page_tokens, stop - full) for page in prefill.own]
        packed += len(prefill.tokens)
    sources, places, lengths = np.array(runs, dtype=np.int64).T
    return _runs(sources, lengths), _runs(places, lengths)


def places_seen(prefills: Sequence[Prefill], page_tokens: int) -> NDArray[np.int64]:
    """[seen] places of every sequence from its first token to the last of the prefill."""
    pages, lengths = [], []
    for prefill in prefills:
        left = prefill.start + len(prefill.tokens)
        for page in (*prefill.pages, *prefill.own[:1]):
            pages.append(page)
            lengths.append(min(left, page_tokens))
            left -= page_tokens
    return _runs(np.array(pages) * page_tokens, np.array(lengths).clip(min=0))


def page_table(prefills: Sequence[Prefill]) -> NDArray[np.int32]:
    """[rows, pages] int32 of the rows that the prefills begin, filled up with zeros."""
    rows = sum(len(prefill.samples) for prefill in prefills)
    pages = np.zeros((rows, 1 + max(len(prefill.pages) for prefill in prefills)), dtype=np.int32)
    first = 0
    for prefill in prefills:
        same = slice(first, first + len(prefill.samples))
        pages[same, : len(prefill.pages)] = prefill.pages
        pages[same, len(prefill.pages)] = prefill.own
        first = same.stop
    return pages


def _runs(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """start, start + 1, ... of each, so many as its length."""
    ends = lengths.cumsum()
    places: NDArray[np.int64] = np.repeat(starts - ends + lengths, lengths) + np.arange(ends[-1])
    return places
