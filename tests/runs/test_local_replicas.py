"""Replicas of a partitioned run on this machine, replaced by processes that imitate them: they start beside the
training ranks, restart when they end, and end with them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from json_files import read_json
from run_helpers import FAKE_RANK
from waiting import until

from launcher.host.attempt.local_ranks import LocalReplicas
from launcher.host.process.processes import start_time
from launcher.host.record.evidence import read_replicas
from launcher.host.record.ledger import ends_in, read_ledger
from megatron_rl.contract.attempt_records import Drain
from megatron_rl.contract.paths import INFER, RunDir
from megatron_rl.contract.records import write

FAKE_REPLICA = str(Path(__file__).parents[1] / "helpers" / "fake_replica.py")
LIMIT_S = 60.0


class Partitioned:
    """A supervisor of one training rank and two replicas.

    options: further options of the supervisor.
    """

    def __init__(
        self,
        root: Path,
        training: str,
        replicas: str,
        *options: str,
        ranks: int = 2,
        gpus: int = 0,
        shared: bool = False,
    ) -> None:
        self.run = RunDir(root)
        self.attempt = self.run.attempt(1)
        self.attempt.folder.mkdir(parents=True)
        command = [sys.executable, "-m", "launcher.host.supervise", "--run-dir", str(root), "--attempt", "1"]
        command += ["--ranks", "1", "--device", "cpu", "--grace", "0.5", "--silence-limit", "60"]
        kept = LocalReplicas(INFER, 2, ranks, gpus, [sys.executable, FAKE_REPLICA, replicas], shared)
        command += ["--replicas", json.dumps(kept), *options]
        command += ["--", sys.executable, FAKE_RANK, training]
        self.process = subprocess.Popen(command, start_new_session=True)

    def pid(self, replica: int, rank: int, start: int = 0) -> int:
        return int(self.seen(replica, rank, start)["pid"])

    def seen(self, replica: int, rank: int, start: int = 0) -> dict:
        file = self.attempt.folder / f"replica.{replica}.{rank}.{start}.json"
        until(file.exists)
        return read_json(file)

    def finish(self) -> None:
        write(self.attempt.drain, Drain("test", "the test", time.time(), deadline=time.time() + LIMIT_S))
        assert self.process.wait(LIMIT_S) == 75, self.log

    @property
    def log(self) -> str:
        return self.attempt.log(0, role="supervisor").read_text()

    def left_over(self) -> list[int]:
        pids = [read_json(file)["pid"] for file in self.attempt.folder.glob("replica.*.json")]
        return [pid for pid in pids if start_time(pid) is not None]


@pytest.fixture
def partitioned(tmp_path: Path) -> Iterator[Callable[..., Partitioned]]:
    started: list[Partitioned] = []

    def start(training: str, replicas: str, *options: str, **sizes: int) -> Partitioned:
        started.append(Partitioned(tmp_path, training, replicas, *options, **sizes))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_replicas_run_beside_the_training_and_end_with_it(partitioned):
    run = partitioned("long", "serve")
    places = [run.seen(replica, rank) for replica in (0, 1) for rank in (0, 1)]
    assert [(int(seen["RANK"]), seen["WORLD_SIZE"]) for seen in places] == [(0, "2"), (1, "2")] * 2
    assert [seen["LOCAL_RANK"] for seen in places] == ["1", "2", "3", "4"], "each rank must have its own GPU"
    assert len({seen["token"] for seen in places}) == 1
    assert len(places[0]["token"]) >= 32
    assert places[0]["mode"] == 0o600
    run.finish()
    assert run.left_over() == []
    assert "infer-0" not in run.log
    (start, end) = read_ledger(run.run)
    assert start.ranks == 5
    assert (end.outcome, end.error) == ("drained", None)
    assert "start 0: serve" in run.attempt.log(1, role="infer-1").read_text()


def test_a_replica_that_starts_its_workers_is_one_process_that_sees_their_gpus(partitioned, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,GPU-5f, 4,3")
    run = partitioned("long", "serve", "--device", "cuda", ranks=1, gpus=2)
    places = [run.seen(replica, 0) for replica in (0, 1)]
    assert [seen["WORLD_SIZE"] for seen in places] == ["1", "1"]
    assert [seen["CUDA_VISIBLE_DEVICES"] for seen in places] == ["6,GPU-5f", "4,3"], "the first is the training's"
    run.finish()
    (start, _) = read_ledger(run.run)
    assert (start.ranks, start.generating) == (5, 4), "GPUs are counted"


def test_each_process_of_a_replica_on_pretended_nodes_sees_its_share_of_the_gpus(partitioned):
    run = partitioned("long", "serve", "--device", "cuda", ranks=2, gpus=4)
    seen = [run.seen(replica, rank)["CUDA_VISIBLE_DEVICES"] for replica in (0, 1) for rank in (0, 1)]
    assert seen == ["1,2", "3,4", "5,6", "7,8"]
    run.finish()


def test_replicas_beside_the_ranks_see_the_same_gpus_which_count_once(partitioned):
    run = partitioned("long", "serve", "--device", "cuda", ranks=1, gpus=2, shared=True)
    assert [run.seen(replica, 0)["CUDA_VISIBLE_DEVICES"] for replica in (0, 1)] == ["0,1", "2,3"]
    run.finish()
    (start, _) = read_ledger(run.run)
    assert (start.ranks, start.generating) == (1, 0)


def test_killed_replica_is_restarted_and_training_continues(partitioned):
    run = partitioned("long", "serve")
    sister = run.pid(1, 1)
    os.kill(run.pid(1, 0), signal.SIGKILL)
    assert start_time(run.pid(1, 0, start=1)) is not None
    assert start_time(sister) is None, "its whole world must end"
    assert start_time(run.pid(0, 0)) is not None, "the other replica must continue"
    until(lambda: [state.starts for state in read_replicas(run.attempt)] == [1, 2])
    assert re.search(r"infer-1 rank 0.*: it was killed by SIGKILL", run.log)
    run.finish()
    assert run.left_over() == []
    assert ends_in(read_ledger(run.run))[0].error is None


def test_replicas_without_a_supervisor_end(partitioned):
    run = partitioned("long", "serve")
    pids = [run.pid(replica, rank) for replica in (0, 1) for rank in (0, 1)]
    run.process.kill()
    until(lambda: not any(start_time(pid) for pid in pids))


def test_run_whose_replicas_all_have_a_wrong_configuration_has_one_too(partitioned):
    run = partitioned("hangs", "misconfigured")
    until(lambda: [state.misconfigured for state in read_replicas(run.attempt)] == [True, True])
    known = run.attempt.folder / "pid.0"
    until(known.exists)  # the replicas may be faster
    rank = int(known.read_text())
    os.kill(rank, signal.SIGKILL)  # as the training would end once it learns of it
    assert run.process.wait(LIMIT_S) == 78, run.log
    (end,) = ends_in(read_ledger(run.run))
    assert end.outcome == "misconfigured"
    assert re.match(r"no inference replica was left: infer-0 rank [01] on .*no such model", end.error)
