"""Completions of deltas, and completions compared as far as rounding lets them be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest

from megatron_rl.inference.api import Completion, Delta


def joined(deltas: Iterable[Delta]) -> list[Completion]:
    """Completions, in sample order, of all deltas of a request."""
    parts: dict[int, list[Delta]] = defaultdict(list)
    for delta in deltas:
        parts[delta.sample].append(delta)
    return [_completion(each) for _, each in sorted(parts.items())]


def _completion(deltas: Sequence[Delta]) -> Completion:
    *before, last = deltas
    assert last.finish_reason is not None
    assert {(delta.finish_reason, delta.stop) for delta in before} <= {(None, None)}
    return Completion(
        [*chain.from_iterable(delta.tokens for delta in deltas)],
        [*chain.from_iterable(delta.logprobs for delta in deltas)],
        last.finish_reason,
        [*chain.from_iterable(delta.versions for delta in deltas)],
        last.stop,
        None if last.top_logprobs is None else [*chain.from_iterable(delta.top_logprobs or [] for delta in deltas)],
        deltas[0].prompt,
    )


def assert_same(made: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same answers; log-probs differ by what their neighbours in the batch do to the order of a sum."""
    assert [(one.tokens, one.finish_reason, one.versions, one.stop) for one in made] == [
        (one.tokens, one.finish_reason, one.versions, one.stop) for one in expected
    ]
    for one, other in zip(made, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-6, abs=2e-6)
        assert (one.top_logprobs is None) == (other.top_logprobs is None)
        for top, others in zip(one.top_logprobs or [], other.top_logprobs or [], strict=True):
            assert [*top.values()] == pytest.approx([*others.values()], rel=1e-6, abs=2e-6)
