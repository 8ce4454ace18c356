"""Completions of an engine whole and joined from deltas, and their comparison up to rounding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

import pytest

from megatron_rl.generate.engine.interface import Completion, Delta, GenerationRequest, SteppedEngine


def answer_all(engine: SteppedEngine, *requests: GenerationRequest) -> list[list[Completion]]:
    """Answer all requests at once, without a loop."""
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
    return [engine.take(request.id) or [] for request in requests]


def joined(deltas: Iterable[Delta]) -> list[Completion]:
    """Join all deltas of a request to completions, in sample order."""
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


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Assert equal answers; log-probs may differ by rounding, which depends on the neighbours in the batch."""
    assert [(one.tokens, one.finish_reason, one.versions, one.stop) for one in found] == [
        (one.tokens, one.finish_reason, one.versions, one.stop) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, rel=1e-6, abs=2e-6)
        assert (one.top_logprobs is None) == (other.top_logprobs is None)
        for top, others in zip(one.top_logprobs or [], other.top_logprobs or [], strict=True):
            assert [*top.values()] == pytest.approx([*others.values()], rel=1e-6, abs=2e-6)
