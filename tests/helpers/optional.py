"""Optional packages, which take long to import."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip a test if a package is not installed. Nothing is imported, because every worker collects all tests."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def mark_real(items: list[pytest.Item], folder: Path, name: str, variable: str) -> None:
    """Mark the tests in a folder, and skip them unless a variable names the interpreter of the real thing, which
    `make test-NAME` installs."""
    missing = pytest.mark.skip(reason=f"{variable} names no Python with {name}: `make test-{name}` installs one")
    for item in items:
        if item.path.is_relative_to(folder):
            item.add_marker(name)
            if not os.environ.get(variable):
                item.add_marker(missing)
