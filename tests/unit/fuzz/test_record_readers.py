"""Readers of the run directory return a record, its absence, or why it cannot be used, whatever the file holds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from examples import examples
from fault_injection import Clock
from furnished_run import make_furnished_run
from hostile import damaged
from hypothesis import given
from hypothesis import strategies as st

from launcher.host.judge.verdict import verdict_of
from launcher.host.record.evidence import Observed, read_drain, read_evidence, read_node_reports, read_replicas
from launcher.host.record.goodput import read_usage
from launcher.runs.state import result_file
from megatron_rl.contract import attempt_records as attempts
from megatron_rl.contract import run_records as runs
from megatron_rl.contract.attempt_records import LEDGER, MetricsLine, TimelineLine
from megatron_rl.contract.evaluation_records import EvaluationResult, PassRate
from megatron_rl.contract.heartbeat_files import decode_slot, read_heartbeat, read_slots
from megatron_rl.contract.manifest import Damaged, find_corruption, find_defect, read_manifest
from megatron_rl.contract.metrics_index import WatchedRecord
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord, counts_of, steps_of
from megatron_rl.contract.records import Absent, Lines, Unreadable, UnreadableRecord, read, read_lines
from megatron_rl.contract.rollout_records import read_rollouts, rollout_parts
from megatron_rl.contract.tail import read_ends


class File(NamedTuple):
    """A file of the run, what reads it, and the errors that callers expect."""

    path: Callable[[RunDir], Path]
    read: Callable[[RunDir], Any]
    errors: tuple[type[Exception], ...] = (OSError,)


def record_in(kind: Any, path: Callable[[RunDir], Path]) -> File:
    def look(run: RunDir) -> None:
        found = read(kind, path(run))
        assert type(found) is kind or isinstance(found, (Absent, Unreadable))

    return File(path, look, ())


def lines_in(kinds: Any, path: Callable[[RunDir], Path]) -> File:
    def look(run: RunDir) -> None:
        assert isinstance(read_lines(kinds, path(run)), (Lines, Unreadable))

    return File(path, look, ())


def _beats(run: RunDir) -> None:
    folder = run.attempt(3).heartbeats
    assert isinstance([decode_slot(slot) for slot in read_slots(folder).values()], list)
    read_heartbeat(folder, 0)


def _manifest(run: RunDir) -> None:
    find_defect(run.checkpoint(12))
    find_corruption(run.checkpoint(12), read_manifest(run.checkpoint(12)).files)


def _evidence(run: RunDir) -> None:
    attempt = run.attempt(3)
    verdict_of(read_evidence(attempt, Observed(code=1), read_drain(attempt)))
    read_replicas(attempt)
    read_node_reports(attempt)


def _plan(run: RunDir) -> None:
    plan = read(PlanRecord, run.plan)
    if isinstance(plan, PlanRecord) and all(0 < count < 100 for count in counts_of(plan)):
        [steps_of(plan, count) for count in counts_of(plan)]


EVIDENCE = ("error.3.json", "drain.json", "hang.json", "fabric.json", "health/n1.json", "replicas/0/state.json")
FILES = [
    record_in(runs.RunIdentity, lambda run: run.identity),
    record_in(runs.Owner, lambda run: run.job),
    record_in(runs.Fork, lambda run: run.fork),
    record_in(runs.LessonRecord, lambda run: run.lesson),
    record_in(attempts.NodeAssignment, lambda run: run.attempt(3).nodes),
    record_in(attempts.FabricReport, lambda run: run.attempt(3).fabric),
    record_in(attempts.RankError, lambda run: run.attempt(3).error(3)),
    record_in(EvaluationResult, lambda run: run.evaluation_results / "x.json"),
    lines_in(LEDGER, lambda run: run.attempts_ledger),
    lines_in(MetricsLine, lambda run: run.metrics),
    lines_in(TimelineLine, lambda run: run.attempt(1).timeline),
    lines_in(PassRate, lambda run: run.evaluation_results / "x.pass_rates.jsonl"),
    File(lambda run: run.plan, _plan, (KeyError,)),
    File(lambda run: run.metrics, lambda run: WatchedRecord(run).new()),
    File(lambda run: run.metrics, lambda run: read_ends(MetricsLine, run.metrics, bool, bool), ()),
    File(lambda run: run.attempt(1).rollouts / "000000.00000.jsonl.gz", lambda run: [*read_rollouts(run, 1, 9)], ()),
    File(lambda run: run.fork, lambda run: ([*read_rollouts(run, 1, 9)], rollout_parts(run, 9)), ()),
    File(lambda run: run.attempt(3).heartbeats / "0.beats", _beats, ()),
    File(lambda run: run.checkpoint(12) / "manifest.json", _manifest, (Damaged,)),
    File(lambda run: run.attempts_ledger, lambda run: read_usage(run, 2e9, True, False), (UnreadableRecord,)),
    File(lambda run: run.attempt(1).timeline, lambda run: read_usage(run, 2e9, True, False), (UnreadableRecord,)),
    *(
        File(partial(lambda name, run: run.attempt(3).folder / name, name), _evidence, ())
        for name in (
            "error.3.json",
            "drain.json",
            "hang.json",
            "fabric.json",
            "health/n1.json",
            "replicas/0/state.json",
        )
    ),
    File(lambda run: run.evaluation_request, result_file, ()),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run = make_furnished_run(tmp_path_factory.mktemp("runs") / "run")
    run.evaluation_request.write_text('{"checkpoint": "a", "out": "/results/x.json"}\n')
    return run


@examples(60)
@given(file=st.sampled_from(FILES), chance=st.randoms(use_true_random=False))
def test_a_damaged_file_is_read_or_refused(run, file, chance):
    path = file.path(run)
    whole = path.read_bytes()
    path.write_bytes(damaged(path.name, whole, chance))
    try:
        with pytest.MonkeyPatch.context() as patch, suppress(*file.errors):
            Clock(patch)  # readers that wait for a stale mount
            file.read(run)
    finally:
        path.write_bytes(whole)
