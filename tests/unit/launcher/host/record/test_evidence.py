"""Whatever an attempt left behind is read, once: srun's words, the end of a log, errors, stacks. Nothing that is there
and cannot be read is taken for absent."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.host.judge.verdict import RankExit, verdict_of
from launcher.host.record import evidence as evidence_module
from launcher.host.record import log_tails
from launcher.host.record.evidence import RANKS, Observed, read_drain, read_evidence
from launcher.host.record.log_tails import LONG_TAIL, end_of_log, parse_exits, tail
from megatron_rl.contract.attempt_records import Drain, Hang, Heartbeat, Outcome, RankError, TimelineLine
from megatron_rl.contract.codes import DRAINED, HEARTBEAT_WAIT, SIGNALLED
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import append, encode, write


@pytest.fixture
def attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Attempt:
    monkeypatch.setattr(evidence_module, "PATIENCE_S", 0.0)
    found = RunDir(tmp_path).attempt(2)
    found.heartbeats.mkdir(parents=True)
    found.logs.mkdir(parents=True)
    return found


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("srun: error: node02: task 1: Killed", RankExit(1, -9, "node02")),
        ("srun: error: node02: task 1: Out Of Memory", RankExit(1, -9, "node02")),
        ("srun: error: gpu-a.cluster: task 12: Segmentation fault (core dumped)", RankExit(12, -11, "gpu-a.cluster")),
        ("srun: error: node02: tasks 0-3,5: Exited with exit code 1", RankExit(0, 1, "node02")),
        ("srun: error: node02: task 3: Exited with exit code 137", RankExit(3, -9, "node02")),
        ("srun: error: node02: task 3: Exited with exit code 255", RankExit(3, 255, "node02")),
        ("srun: error: node02: task 3: something new", None),
        ("srun: Job step creation temporarily disabled, retrying", None),
        ("", None),
    ],
)
def test_srun_names_the_rank_that_ended(line, ended):
    assert parse_exits(line) == ([] if ended is None else [ended])


def test_the_first_rank_that_srun_names_took_the_others_along():
    said = "srun: error: node02: task 1: Killed\nsrun: Terminating StepId=1.0\nsrun: error: node01: task 0: Killed\n"
    assert parse_exits(said) == [RankExit(1, -9, "node02")]


def test_of_further_nodes_those_are_named_whose_ranks_left_by_themselves():
    said = "srun: error: n1: tasks 0-7: Exited with exit code 2\nsrun: error: n2: tasks 8-15: Exited with exit code 2\n"
    said += "srun: error: n3: task 16: Terminated\n"
    assert parse_exits(said) == [RankExit(0, 2, "n1"), RankExit(8, 2, "n2")]


@pytest.mark.parametrize("line", ["srun: error: Node failure on node03", "srun: Force Terminated StepId=1.0"])
def test_ranks_that_slurm_ended_did_not_die_by_themselves(line):
    assert parse_exits(f"{line}\nsrun: error: node01: task 0: Killed\n") == []


def test_there_may_be_no_word_of_srun(attempt):
    assert parse_exits(tail(attempt.srun, LONG_TAIL)) == []


def test_a_log_may_be_missing_or_huge(attempt):
    assert end_of_log(attempt.log(0)) == ""
    attempt.log(0).write_text("x" * 1_000_000)
    assert len(end_of_log(attempt.log(0))) == 300


def test_all_that_is_there_is_read(attempt):
    attempt.srun.write_text("srun: error: node02: task 1: Exited with exit code 1\n")
    attempt.log(1).write_text("Traceback ...\nModuleNotFoundError: No module named 'torch'\n\n")
    attempt.stacks(0).write_text("Thread 1\n")
    attempt.stacks(1).write_text("")
    for rank in (0, 1):
        write_heartbeat(attempt.heartbeats, Heartbeat(rank, 2, "node", "train", 7, 9, 5.0, 5.0, 10.0))
    for rank, seconds in ((0, 20), (1, 10)):
        write(attempt.error(rank), RankError(rank, "node", 7, "train", f"error {rank}"))
        os.utime(attempt.error(rank), (seconds, seconds))
    write(attempt.outcome, Outcome(DRAINED, 40))
    evidence = read_evidence(attempt, Observed(code=1), None)
    assert [error.rank for error in evidence.errors] == [1, 0], "oldest first"
    assert evidence.exits == [RankExit(1, 1, "node02")]
    assert evidence.last_lines == {1: "ModuleNotFoundError: No module named 'torch'"}
    assert evidence.stacks == {0: "logs/attempt-002/train.0.stacks"}
    assert evidence.outcome == Outcome(DRAINED, 40)


def test_ranks_that_were_asked_to_leave_and_killed_are_no_evidence(attempt):
    attempt.srun.write_text("srun: error: node02: task 1: Killed\n")
    for by, counts in (("SIGUSR1 to the batch host", False), ("a request to rank 0", True)):
        assert bool(read_evidence(attempt, Observed(), Drain(SIGNALLED, by, 0.0)).exits) is counts
    assert read_evidence(attempt, Observed(unseen="its script was killed"), None).exits == []


def test_what_ranks_report_after_they_were_ended_came_of_that(attempt):
    drain = Drain("preempted", "me", 0.0, deadline=100.0)
    for rank, at in ((0, 94.0), (1, 96.0)):
        write(attempt.error(rank), RankError(rank, "node", 7, "train", "boom", at=at))
    assert [error.rank for error in read_evidence(attempt, Observed(), drain).errors] == [0]


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_a_node_whose_clock_is_wrong_is_not_the_one_that_was_waited_for(attempt: Attempt, hours: int) -> None:
    """Nobody watched the ranks: the host of the batch script was lost with it."""
    for rank, skew in ((0, 0.0), (1, 3600.0 * hours)):
        now = 5000.0 + skew
        write_heartbeat(
            attempt.heartbeats, Heartbeat(rank, 2, f"n{rank}", HEARTBEAT_WAIT, 7, 7, now - 700.0, now, 10.0)
        )
        os.utime(attempt.heartbeats / f"{rank}.beats", (5000.0, 5000.0))
    evidence = read_evidence(attempt, Observed(exits=[RankExit(0, -signal.SIGABRT)]), None)
    assert [(beat.at, beat.written) for beat in evidence.heartbeats] == [(4300.0, 5000.0)] * 2
    assert verdict_of(evidence).rank == 0, "rank 1 is as far"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"version": 9}'])
def test_what_cannot_be_read_is_there_all_the_same(attempt, content):
    for file in (attempt.outcome, attempt.hang, attempt.error(3), attempt.drain, attempt.heartbeats / "0.beats"):
        file.write_bytes(content)
    drain = read_drain(attempt, patience=0.0)
    assert drain is not None and drain.cause == SIGNALLED
    evidence = read_evidence(attempt, Observed(code=1), drain)
    assert set(evidence.unreadable_errors) == {3}
    assert evidence.unreadable_outcome is not None
    assert verdict_of(evidence).rank == 3


def test_a_hang_that_was_seen_counts_though_it_could_not_be_written(attempt):
    hang = Hang(1, "n1", "generate", 3, 6.0, 0.0)
    assert read_evidence(attempt, Observed(hang=hang), None).hang == hang


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            """pyxis: importing docker image: centos
slurmstepd: error: pyxis: child 15352 failed with error code: 1
slurmstepd: error: pyxis: failed to import docker image: centos
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     [INFO] Extracting image layers...
slurmstepd: error: pyxis:     mkdir: cannot create directory '/run/user/1000': Permission denied
slurmstepd: error: pyxis: couldn't start container""",
            "mkdir: cannot create directory '/run/user/1000': Permission denied",
        ),
        (
            """slurmstepd-sp-0016: error: pyxis: child 7 failed with error code: 1
slurmstepd-sp-0016: error: pyxis: failed to create container filesystem for image: /i.sqsh
slurmstepd-sp-0016: error: pyxis: printing enroot log file:
slurmstepd-sp-0016: error: pyxis:     [ERROR] File already exists: /data/pyxis_17.0
slurmstepd-sp-0016: error: pyxis: couldn't start container""",
            "[ERROR] File already exists: /data/pyxis_17.0",
        ),
        (
            """slurmstepd: error: pyxis: container start failed with error code: 1
slurmstepd: error: pyxis: printing enroot log file:
slurmstepd: error: pyxis:     enroot-mount: failed to mount: /data at /d: No such file or directory
slurmstepd: error: pyxis:     [ERROR] /etc/enroot/hooks.d/10-shadow.sh exited with return code 1
slurmstepd: error: pyxis: couldn't start container
slurmstepd: error: pyxis: if the image has an unusual entrypoint, try using --no-container-entrypoint""",
            "enroot-mount: failed to mount: /data at /d: No such file or directory",
        ),
        ("slurmstepd: error: pyxis: couldn't chdir to /x: No such file", "couldn't chdir to /x: No such file"),
        (
            "slurmstepd: error: pyxis: couldn't start container",
            "slurmstepd: error: Failed to invoke spank plugin stack",
        ),
    ],
)
def test_why_a_container_did_not_start_stands_above_the_last_line(tmp_path, said, reason):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.logs.mkdir(parents=True)
    ends = "\nslurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
    attempt.log(0).write_text(f"{said}{ends}slurmstepd: error: Failed to invoke spank plugin stack\n")
    assert end_of_log(attempt.log(0)) == reason


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("slurmstepd: error: execve(): python3: No such file", "execve(): python3: No such file"),
        ("rank: 1: exec: /opt/py: not found", "exec: /opt/py: not found"),
        ("rank: line 1: exec: /opt: cannot execute: Is a directory", "exec: /opt: cannot execute: Is a directory"),
        ("/usr/bin/python3: No module named megatron_rl.rank_main", "No module named megatron_rl.rank_main"),
        ("Traceback ...\nRuntimeError: boom", None),
    ],
)
def test_a_log_tells_whether_a_rank_never_began(attempt, said, why):
    attempt.srun.write_text("srun: error: n1: task 0: Exited with exit code 2\n")
    attempt.log(0).write_text(said + "\n")
    found = read_evidence(attempt, Observed(code=2), None).not_started
    assert found == ({} if why is None else {0: why})
    write_heartbeat(attempt.heartbeats, Heartbeat(0, 1, "n1", "starting", 0, 0, 1.0, 1.0, 10.0))
    assert read_evidence(attempt, Observed(code=2), None).not_started == {}, "it has begun"


@pytest.mark.parametrize(("place", "own"), [("/tmp/torch", True), ("RUN/metrics.jsonl", False), ("/lustre/x", False)])
def test_a_ranks_full_disk_is_its_nodes_own_where_it_does_not_hold_the_run(attempt, place, own):
    path = place.replace("RUN", str(attempt.folder.parent.parent))
    error = f"OSError: [Errno 28] No space left on device: '{path}'"
    write(attempt.error(0), RankError(0, "n1", 7, "train", error))
    (found,) = read_evidence(attempt, Observed(code=1), None).errors
    assert found.error == ("on its node's own disk: " if own else "") + error


@pytest.mark.parametrize(
    ("number", "why"),
    [(errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system"), (errno.EIO, None), (0, None)],
)
def test_where_no_rank_left_a_word_the_disk_is_tried(attempt, monkeypatch, number, why):
    def fsync(descriptor: int) -> None:
        if number:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    died = Observed(exits=[RankExit(0, 1)])
    assert read_evidence(attempt, died, None).unwritable == (why and f"{why}: '{attempt.folder}'")
    lost = RankError(1, "n1", 7, "train", "PeerLost: rank 0 closed its connection: it has ended")
    attempt.error(1).write_text(encode(lost))
    assert read_evidence(attempt, died, None).unwritable == (why and f"{why}: '{attempt.folder}'"), "a peer's report"
    attempt.error(1).unlink()
    append(attempt.timeline, TimelineLine(1.0, 41, {"train": 1.0}))
    append(attempt.timeline, TimelineLine(2.0, 42, {"train": 1.0}))
    assert read_evidence(attempt, died, None).trained == 42
    assert {path.name for path in attempt.folder.iterdir()} == {"timeline.jsonl", "heartbeats"}, "it leaves nothing"
    attempt.outcome.write_text("{}")
    assert read_evidence(attempt, died, None).unwritable is None, "a rank has left a word"


def test_what_pyxis_said_before_the_ranks_started_is_not_how_they_ended(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.logs.mkdir(parents=True)
    attempt.log(0).write_text(
        "slurmstepd: error: pyxis: couldn't chdir to /x\nModuleNotFoundError: No module named 'x'\n"
    )
    assert end_of_log(attempt.log(0)).startswith("ModuleNotFoundError")


def test_whether_the_ranks_were_in_a_container_is_evidence(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    attempt.folder.mkdir(parents=True)
    assert not read_evidence(attempt, Observed(), None).in_container
    attempt.image.touch()
    assert read_evidence(attempt, Observed(), None).in_container


ABORTS = """
import os, sys
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox

attempt = RunDir(sys.argv[1]).attempt(2)
BlackBox(attempt, 0, 1, Activity(attempt, published=False)).start()
said = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4, NumelOut=4, "
said += "Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
print("[rank0]:[E621 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 0]", said, file=sys.stderr)
print("terminate called after throwing an instance of 'c10::DistBackendError'", file=sys.stderr)
for number in range(200):
    print(f"frame #{number}: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x10c", file=sys.stderr, flush=True)

def in_a_collective(depth):
    os.abort() if not depth else in_a_collective(depth - 1)

in_a_collective(90)
"""


def test_a_rank_that_nccls_watchdog_aborted_has_in_its_log_what_timed_out(attempt):
    """The rank cannot write an error file, and stacks follow in its log, Python's from its black box included."""
    with attempt.log(0).open("wb") as log:
        command = [sys.executable, "-c", ABORTS, str(attempt.folder.parent.parent)]
        rank = subprocess.run(command, stdout=log, stderr=log, timeout=60, check=False)
    assert rank.returncode == -signal.SIGABRT
    assert "in in_a_collective" in attempt.log(0).read_text()
    assert not attempt.errors()
    verdict = verdict_of(read_evidence(attempt, Observed(exits=[RankExit(0, rank.returncode)]), None))
    assert verdict.error is not None
    assert verdict.error.startswith("a collective timed out: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=4,")
    assert verdict.rank == 0


TIMED_OUT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)"


def test_of_hundreds_that_failed_together_those_are_read_that_decide(attempt, monkeypatch):
    ranks, behind, died = 3 * RANKS, 100, 150
    for rank in range(ranks):
        step = 6 if rank == behind else 7 + (rank > 120)  # more have waited than are read, and some not yet
        write_heartbeat(attempt.heartbeats, Heartbeat(rank, ranks, f"n{rank}", "train", step, step, 90.0, 99.0, 10.0))
        attempt.log(rank).write_text(
            ""
            if rank == behind
            else f"{'x' * (1 << 17)}\nWatchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n"
        )
        write(attempt.error(rank), RankError(rank, f"n{rank}", step, "train", "lost connection"))
        os.utime(attempt.error(rank), (rank, rank))
    read_bytes: list[int] = []
    monkeypatch.setattr(log_tails, "tail", lambda path, size: read_bytes.append(size) or tail(path, size))
    aborted = read_evidence(attempt, Observed(exits=[RankExit(0, -signal.SIGABRT)]), None)
    assert (len(aborted.timed_out), sum(read_bytes) < RANKS * (1 << 16) + (1 << 14)) == (RANKS - 1, True)
    assert verdict_of(aborted._replace(errors=[])).rank == behind
    killed = read_evidence(attempt, Observed(exits=[RankExit(died, -signal.SIGKILL)]), None)
    assert [error.rank for error in killed.errors] == [*range(RANKS), behind, died]


def test_where_no_rank_said_a_word_sruns_last_ones_tell(attempt):
    attempt.srun.write_text("srun: waiting\nsrun: error: Unable to create step for job 3: no such node\n\n")
    verdict = verdict_of(read_evidence(attempt, Observed(code=1), None))
    told = "the step left with exit code 1 and recorded no outcome; srun: Unable to create step for job 3: no such node"
    assert verdict.error == told


def test_a_replica_is_judged_by_its_own_files(attempt):
    replica = attempt.replica(1)
    replica.heartbeats.mkdir(parents=True)
    replica.log(0).write_text("loading\nMemoryError\n")
    write(attempt.outcome, Outcome(DRAINED, 3))
    attempt.stacks(0).write_text("of another rank")
    verdict = verdict_of(read_evidence(replica, Observed(exits=[RankExit(0, -9)], code=-9), None))
    assert verdict.outcome == "crashed"
    assert (
        verdict.error
        == "it was killed by SIGKILL (often: out of memory) without an error report; its log ends: MemoryError"
    )
