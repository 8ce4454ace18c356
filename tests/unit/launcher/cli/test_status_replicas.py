"""Inference replicas of a partitioned run in `mrl status`."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.show.status import replica_lines, replicas_json
from megatron_rl.contract.attempt_records import ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_GIVEN_UP, REPLICA_RUNNING, REPLICA_WAITING
from megatron_rl.contract.paths import TEACHER, Attempt, RunDir
from megatron_rl.contract.records import write

BOOM = "rank 0 on n5: RuntimeError: boom"


def lines(root: Path, *states: ReplicaState, addresses: tuple[ReplicaAddress, ...] = ()) -> list[str]:
    attempt = RunDir(root).attempt(1)
    for state in states:
        attempt.replica(state.replica).folder.mkdir(parents=True)
        write(attempt.replica(state.replica).state, state)
    for address in addresses:
        write(attempt.replica(address.replica).listener, address)
    return replica_lines(replicas_json(attempt), now=1000.0)


def at(replica: int, start: int) -> ReplicaAddress:
    return ReplicaAddress(replica, start, "10.0.0.5", 40211, 2, "", 1, 810.0)


def test_each_replica_has_a_line_with_its_address_or_its_failure(tmp_path):
    told = lines(
        tmp_path,
        ReplicaState(0, REPLICA_RUNNING, 1, 800.0, ["n5"]),
        ReplicaState(1, REPLICA_RUNNING, 3, 900.0, ["n6"], f"infer-1 {BOOM}"),
        ReplicaState(2, REPLICA_WAITING, 1, 995.0, [], f"infer-2 {BOOM}"),
        ReplicaState(3, REPLICA_GIVEN_UP, 6, 500.0, [], f"infer-3 {BOOM}"),
        addresses=(at(0, 0), at(1, 1)),
    )
    assert told == [
        "infer-0: answers at 10.0.0.5:40211 for 3:10",
        f"infer-1: starts on n6 for 1:40, 3 starts; infer-1 {BOOM}",  # the address is that of the start before
        f"infer-2: waiting for 0:05, 1 start; infer-2 {BOOM}",
        f"infer-3: given up after 6 starts; infer-3 {BOOM}",
    ]


def test_replicas_of_the_teacher_follow_under_their_own_name(tmp_path):
    teacher = RunDir(tmp_path).attempt(1).replica(0, TEACHER)
    teacher.folder.mkdir(parents=True)
    write(teacher.state, ReplicaState(0, REPLICA_RUNNING, 1, 800.0))
    write(teacher.listener, at(0, 0))
    assert lines(tmp_path, ReplicaState(0, REPLICA_RUNNING, 1, 880.0)) == [
        "infer-0: starts for 2:00",
        "teacher-0: answers at 10.0.0.5:40211 for 3:10",
    ]


def test_a_replica_with_an_unreadable_state_is_listed(tmp_path):
    attempt: Attempt = RunDir(tmp_path).attempt(1)
    attempt.replica(0).folder.mkdir(parents=True)
    attempt.replica(0).state.write_text("{")
    assert replica_lines(replicas_json(attempt), now=1000.0) == ["infer-0: starts"]
    assert lines(tmp_path / "other") == []
