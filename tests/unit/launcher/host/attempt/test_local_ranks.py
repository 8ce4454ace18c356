"""The ranks of a local run, as its supervisor starts and ends them."""

from __future__ import annotations

import signal
import sys

from launcher.host.attempt.local_ranks import LocalRanks, RankSettings, _Processes
from launcher.host.attempt.runner import LEAVE_LIMIT_S
from megatron_rl.contract.child import KILLED_S, Child
from megatron_rl.contract.paths import RunDir


def test_ranks_that_nothing_ends_are_not_waited_for_for_ever(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    attempt = run.attempt(1)
    attempt.logs.mkdir(parents=True)
    sleeps = [sys.executable, "-c", "import time; time.sleep(100)"]
    ranks = LocalRanks(run, attempt, RankSettings(1, 1, "cpu", 0.0, 5.0, sleeps))
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # it is pytest's process
    ranks.start()
    try:
        monkeypatch.setattr(Child, "send", lambda child, signum: None)  # as one that hangs in a driver hears it
        for now in (100.0, 106.0, 107.0):
            ranks.end(now, hurried=False)
        assert ranks.exits() == []
        assert not ranks.are_stuck(106.0 + KILLED_S - 1)
        assert ranks.are_stuck(106.0 + KILLED_S)
    finally:
        ranks.close()


class Gone:
    """A process that has ended, or not."""

    def __init__(self, code: int | None) -> None:
        self.code, self.heard = code, []

    def exit_code(self) -> int | None:
        return self.code

    def send(self, signum: int) -> None:
        self.heard.append(signum)


def test_once_a_rank_of_a_replica_has_left_the_others_have_a_minute_to_follow():
    world = _Processes(grace=5.0)
    left, stays = Gone(0), Gone(None)
    world._children = [left, stays]
    for now in (100.0, 100.0 + LEAVE_LIMIT_S - 1):
        assert world.observed(now) is None
    assert stays.heard == []
    for now in (100.0 + LEAVE_LIMIT_S, 106.0 + LEAVE_LIMIT_S):
        assert world.observed(now) is None
    assert (stays.heard, left.heard) == ([signal.SIGTERM, signal.SIGKILL], [])
