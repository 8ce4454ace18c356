"""Inference replicas of a partitioned run in `mrl status`."""

from __future__ import annotations

from pathlib import Path

from launcher.cli.show.history import HistoryReader, replicas_json
from launcher.cli.show.progress_lines import ProgressLines
from launcher.cli.show.status_rows import replica_lines
from megatron_rl.contract.attempt_records import Progress, ReplicaAddress, ReplicaState
from megatron_rl.contract.codes import REPLICA_FINISHED, REPLICA_GIVEN_UP, REPLICA_RUNNING, REPLICA_WAITING
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
        ReplicaState(4, REPLICA_FINISHED, 2, 500.0, [], f"infer-4 {BOOM}"),
        addresses=(at(0, 0), at(1, 1)),
    )
    ended = "the last one ended: infer"
    assert told == [
        "infer-0: answers at 10.0.0.5:40211 for 3:10",
        f"infer-1: starts on n6 for 1:40, 3 starts; {ended}-1 {BOOM}",  # the address is that of the start before
        f"infer-2: waiting for 0:05, 1 start; {ended}-2 {BOOM}",
        f"infer-3: given up after 6 starts; infer-3 {BOOM}",
        "infer-4: finished",
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


def test_the_terminal_says_which_replica_a_run_waits_for_and_why_it_ended_last(tmp_path, capsys):
    attempt = RunDir(tmp_path).attempt(1)
    replica = attempt.replica(0)
    replica.folder.mkdir(parents=True)
    reader, view = HistoryReader(RunDir(tmp_path), attempt, 9), ProgressLines()

    def shown(state: str, starts: int, why: str | None = None) -> list[str]:
        write(replica.state, ReplicaState(0, state, starts, 0.0, [], why))
        reader._looked_at = float("-inf")
        view.show(reader.poll())
        return [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()]

    write(replica.progress, Progress("starting vLLM", 0))
    assert shown(REPLICA_RUNNING, 1) == ["starting", "infer-0: starting vLLM"]
    assert shown(REPLICA_RUNNING, 1) == [], "nothing has changed"
    again = [f"infer-0: waiting, 1 start; the last one ended: infer-0 {BOOM}"]
    assert shown(REPLICA_WAITING, 1, f"infer-0 {BOOM}") == again
    again = [f"infer-0: starting vLLM, 2 starts; the last one ended: infer-0 {BOOM}"]
    assert shown(REPLICA_RUNNING, 2, f"infer-0 {BOOM}") == again
    write(replica.listener, at(0, 1))
    assert shown(REPLICA_RUNNING, 2, f"infer-0 {BOOM}") == [], "it answers"


def test_a_run_does_not_wait_for_a_replica_that_starts_beside_others(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    states = [(REPLICA_RUNNING, 1), (REPLICA_RUNNING, 2), (REPLICA_WAITING, 1)]
    for number, (state, starts) in enumerate(states):
        attempt.replica(number).folder.mkdir(parents=True)
        write(attempt.replica(number).state, ReplicaState(number, state, starts, 0.0))
    write(attempt.replica(0).listener, at(0, 0))
    found = HistoryReader(RunDir(tmp_path), attempt, 9).poll().waits_for
    assert [one["name"] for one in found] == ["infer-2"], "this one has ended"
