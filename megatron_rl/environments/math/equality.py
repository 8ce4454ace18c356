"""Are two answers equal? What a worker of math/verifier.py says, by math-verify.

sympy can take for ever on a few characters such as 9^{9^{9^9}}, in code that no exception interrupts. So nothing but
such a worker imports this, which has limits of time and memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from math_verify import parse, verify

logging.disable(logging.WARNING)  # math-verify warns that we keep the time ourselves


def equal(texts: Sequence[str]) -> bool:
    """Of the right answer and another one. Raises MemoryError."""
    try:
        golden, answer = (parse(f"\\boxed{{{text}}}", parsing_timeout=None, raise_on_error=True) for text in texts)
        return bool(verify(golden, answer, timeout_seconds=None, raise_on_error=True))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - math-verify raises anything on text it cannot read: that is no right answer
        return False
