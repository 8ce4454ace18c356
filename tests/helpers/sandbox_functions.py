"""Functions that the workers of the sandbox's tests run."""

from __future__ import annotations

import os
import re
from typing import Any


def backtracks(text: str) -> bool:
    """Match a pattern in time that doubles with every character."""
    return re.fullmatch(r"(a+)+b", text) is not None


def answer(request: str) -> Any:
    match request:
        case "pid":
            return os.getpid()
        case "environment":
            return sorted(os.environ)
        case "does not wait":
            os.set_blocking(2, False)
            return os.write(2, b"")
        case "raise":
            return 1 / 0
        case "set":
            return {1}
        case "long":
            return "x" * 2**22
        case "grow":
            return len(bytearray(2**40))
