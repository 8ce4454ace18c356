"""Syntax trees of the project's files."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path


@cache
def parsed(file: Path) -> ast.Module:
    """Parse a file.

    Without garbage collection: a finalizer that logs a traceback parses a line in turn, and Python 3.11 then raises
    SystemError ("AST constructor recursion depth mismatch").
    """
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"))
    finally:
        gc.enable()
