"""A poll sees the heartbeats that are there: the thread that reads them is not waited for."""

from __future__ import annotations

import pytest

from launcher.host.record import heartbeats
from megatron_rl.contract.paths import RankFiles


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_once(files: RankFiles) -> heartbeats.Look:
        look = heartbeats.Look(files)
        look.read()
        return look

    monkeypatch.setattr(heartbeats, "begin_look", look_at_once)
