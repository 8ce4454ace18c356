"""Number of examples of Hypothesis for tests that set their own."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

OF_A_COMMIT = 15
"""Default number of examples in `make test`."""


def examples(count: int, **others: Any) -> settings:
    """Settings with `count` examples in `make test`, for slow tests or those with many cases. A profile with more
    examples by default multiplies `count` by the same factor."""
    return settings(max_examples=max(1, count * settings.default.max_examples // OF_A_COMMIT), **others)
