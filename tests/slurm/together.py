"""Concurrent tests of one file, each as its own user, because jobs mostly wait."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from lab import Cluster
from login import Login

AT_ONCE = 5
"""Tests that run concurrently. The lab has ten nodes, and the machine few cores."""

Body = Callable[..., None]


class Together:
    """Decorator that makes tests of functions of a Login and of shared fixtures. The first test starts all selected
    ones of its file. A test that needs certain nodes must not share them with another test of the file."""

    def __init__(self) -> None:
        self._bodies: dict[str, Body] = {}
        self._running: dict[str, Future[None]] = {}

    def __call__(self, body: Body) -> Callable[..., None]:
        self._bodies[body.__name__] = body

        @functools.wraps(body)
        def test(request: pytest.FixtureRequest, lab: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
            if not self._running:
                self._start(request, lab, tmp_path_factory)
            self._running[body.__name__].result()

        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would look there for the fixtures
        return test

    def _start(self, request: pytest.FixtureRequest, lab: Cluster, folders: pytest.TempPathFactory) -> None:
        selected = {item.name for item in request.session.items}
        pool, number = ThreadPoolExecutor(AT_ONCE), count()
        for name, body in self._bodies.items():
            if name in selected:
                _, *shared = inspect.signature(body).parameters
                fixtures = {name: request.getfixturevalue(name) for name in shared}
                folder = folders.mktemp(f"together{next(number)}")
                self._running[name] = pool.submit(_as_user, body, lab, folder, fixtures)
        pool.shutdown(wait=False)


def _as_user(body: Body, lab: Cluster, folder: Path, fixtures: dict[str, Any]) -> None:
    with Login(lab, folder / "home", folder / "share") as login:
        body(login, **fixtures)
