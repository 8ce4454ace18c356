"""A poll sees the heartbeats that are there: the thread that reads them is not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.host.record import heartbeats


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_once(folder: Path) -> heartbeats.Look:
        look = heartbeats.Look(folder)
        look.read()
        return look

    monkeypatch.setattr(heartbeats, "begin_look", look_at_once)
