"""How many examples Hypothesis tries where a test says so itself."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

OF_A_COMMIT = 25
"""Examples of a test that says nothing, in `make test`."""


def examples(count: int, **others: Any) -> settings:
    """`count` in `make test`, for tests that are dear or have much to find; in a profile that tries more of every test,
    as many times more."""
    return settings(max_examples=max(1, count * settings.default.max_examples // OF_A_COMMIT), **others)
