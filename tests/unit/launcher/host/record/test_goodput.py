"""Every second of every GPU is charged to one category, once, over all attempts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import make_run

from launcher.cli.show.status_rows import status_json, status_lines
from launcher.host.record.accounting import CATEGORIES, AttemptTrace, AttemptUsage, gpu_usage, in_queue
from launcher.host.record.goodput import mark, read_usage
from launcher.runs.state import read_status
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, Heartbeat, Outcome, TimelineLine
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import Owner
from megatron_rl.contract.time_total import RunningTotal
from megatron_rl.rank.metrics import timeline


def start(attempt: int, at: float, **facts: Any) -> AttemptStart:
    return AttemptStart(attempt, at, **facts)


def end(attempt: int, at: float, outcome: str) -> AttemptEnd:
    """An end recorded by the process that ran the attempt, or by the next start, which found it lost."""
    return AttemptEnd(attempt, at, outcome, seconds=None if outcome == "lost" else 1.0)


def seconds(**named: float) -> dict[str, float]:
    """{category: seconds}; start_up is `start-up`."""
    return {name.replace("_", "-"): value for name, value in named.items()}


def line(at: float, step: int, facts: dict[str, Any] | None = None, **named: float) -> TimelineLine:
    return TimelineLine(at, step, seconds(**named), **(facts or {}))


def charged(usage: AttemptUsage) -> dict[str, float]:
    return {name: seconds for name, seconds in usage.seconds.items() if seconds}


def usage_of(
    *lines: AttemptStart | AttemptEnd, now: float = 1000.0, traces: dict[int, AttemptTrace] | None = None, **facts: Any
):
    return gpu_usage(lines, traces or {}, now, **facts)


# A run of 4 ranks: preempted on three nodes of two GPUs, one of them spare; killed there; finished on two nodes.
JOB = {"job_id": "7", "submitted_at": 0.0}
LEDGER = [
    start(1, 100.0, gpus=6, restart=0, **JOB),
    end(1, 255.0, "drained"),
    start(2, 355.0, gpus=6, restart=1, **JOB),
    end(2, 525.0, "crashed"),
    start(3, 585.0, gpus=4, restart=2, **JOB),
    end(3, 665.0, "finished"),
]
TRACES = {
    1: AttemptTrace(
        [
            line(160.0, 0, {"began": 140.0, "ranks": 4, "resumed": 0}, start_up=40, load=40),
            line(200.0, 1, generate=80, reward=20, log_probs=10, train=40, refit=10),
            line(240.0, 2, generate=80, train=60, save=20),
            line(250.0, 2, generate=20, train=12, drain=8),
        ],
        image=110.0,
        ready=130.0,
        asked=245.0,
        left=True,
    ),
    2: AttemptTrace(
        [
            line(385.0, 2, {"began": 375.0, "ranks": 4, "resumed": 2}, start_up=16, load=24),
            line(425.0, 3, generate=80, train=80),
            line(465.0, 4, generate=80, train=60, save=20),
            line(505.0, 5, save=20, generate=90, train=50),
        ],
        image=357.0,
        ready=370.0,
    ),
    3: AttemptTrace(
        [
            line(610.0, 4, {"began": 600.0, "ranks": 4, "resumed": 4}, start_up=20, load=20),
            line(650.0, 5, generate=90, wait=10, train=60),
            line(660.0, 5, evaluate=30, save=10),
        ],
        image=586.0,
        ready=595.0,
        left=True,
    ),
}


def test_a_run_that_was_preempted_killed_and_finished():
    usage = gpu_usage(LEDGER, TRACES, now=700.0)
    first, second, third = map(charged, usage.attempts)
    used = seconds(generate=180, reward=20, log_probs=10, train=100, refit=10)
    assert first == used | seconds(queue=600, image=60, start_up=220, load=40, save=20, wait=220, drain=38, lost=12)
    used = seconds(generate=160, train=140)
    assert second == used | seconds(queue=600, image=12, start_up=124, load=24, save=40, wait=180, lost=340)
    used = seconds(generate=90, train=60, evaluate=30)
    assert third == used | seconds(queue=240, image=4, start_up=76, load=20, save=10, wait=10, drain=20)
    told = usage.as_json()
    assert told["held_gpu_seconds"] == 6 * 155 + 6 * 170 + 4 * 80
    assert told["goodput"] == pytest.approx(800 / 2270)
    assert told["goodput_with_queue"] == pytest.approx(800 / (2270 + 1440))
    assert sum(told["shares"].values()) == pytest.approx(1)


def test_nothing_is_lost_before_a_later_attempt_says_where_it_went_on():
    (row,) = usage_of(*LEDGER[:2], traces=TRACES).attempts
    assert (row.seconds["train"], row.seconds["lost"]) == (112, 0)


def test_a_checkpoint_that_turned_out_bad_makes_older_work_lost_too():
    third = AttemptTrace([line(610.0, 3, {"resumed": 3, "ranks": 4}, load=40)])
    (_, second, _) = gpu_usage(LEDGER, {**TRACES, 3: third}, now=700.0).attempts
    assert second.seconds["generate"] == 80
    assert second.seconds["lost"] == 340 + 20 + 220


def test_while_it_starts_its_time_is_start_up():
    (row,) = usage_of(start(1, 900.0, gpus=2), traces={1: AttemptTrace(image=910.0)}, running=True).attempts
    assert charged(row) == {"image": 20, "start-up": 180}


def test_while_it_runs_it_is_charged_up_to_the_last_line():
    lines = [line(920.0, 0, {"began": 910.0, "ranks": 2}, load=20), line(950.0, 1, train=60)]
    (row,) = usage_of(start(1, 900.0, gpus=2), traces={1: AttemptTrace(lines)}, running=True).attempts
    assert charged(row) == {"start-up": 20, "load": 20, "train": 60}
    assert row.end == 950.0


def test_without_a_timeline_what_an_attempt_did_is_lost_and_how_it_left_is_known():
    ledger = [start(1, 0.0, gpus=1), end(1, 100.0, "drained")]
    assert charged(usage_of(*ledger).attempts[0]) == {"lost": 100}
    known = {1: AttemptTrace(image=10.0, ready=30.0, asked=80.0, left=True)}
    assert charged(usage_of(*ledger, traces=known).attempts[0]) == seconds(image=10, start_up=20, lost=50, drain=20)


def test_a_line_that_was_torn_is_lost_time():
    lines = [line(20.0, 0, {"ranks": 2}, load=40), line(100.0, 2, train=60)]
    (row,) = usage_of(
        start(1, 0.0, gpus=2), end(1, 100.0, "finished"), traces={1: AttemptTrace(lines, left=True)}
    ).attempts
    assert charged(row) == {"load": 40, "train": 60, "lost": 100}


def test_a_killed_batch_script_held_its_gpus_until_the_last_sign_of_life():
    lines = [line(20.0, 0, {"began": 0.0, "ranks": 1}, load=20)]
    ledger = [
        start(1, 0.0, job_id="7", restart=0, gpus=1),
        end(1, 500.0, "lost"),  # by the next one
        start(2, 500.0, job_id="7", restart=1, gpus=1),
        end(2, 510.0, "crashed"),
    ]
    first, second = usage_of(*ledger, traces={1: AttemptTrace(lines, seen=30.0)}).attempts
    assert charged(first) == {"load": 20, "lost": 10}
    assert second.seconds["queue"] == 470


def test_an_attempt_whose_node_died_but_not_its_batch_script_held_its_gpus_to_its_end():
    ledger = [start(1, 0.0, gpus=1), end(1, 500.0, "lost")._replace(seconds=500.0)]
    (row,) = usage_of(*ledger, traces={1: AttemptTrace(seen=30.0)}).attempts
    assert charged(row) == {"lost": 500}


def test_a_supervisor_that_was_killed_leaves_a_pause_that_is_nobodys():
    ledger = [start(1, 0.0, ranks=2), end(1, 500.0, "lost"), start(2, 500.0, ranks=2), end(2, 510.0, "crashed")]
    first, second = usage_of(*ledger, traces={1: AttemptTrace(seen=30.0)}).attempts
    assert charged(first) == {"lost": 60}
    assert charged(second) == {"lost": 20}


def test_the_pause_before_a_resume_by_hand_is_nobodys():
    first = [start(1, 10.0, job_id="7", submitted_at=0.0, gpus=1), end(1, 20.0, "stopped")]
    again = [start(2, 950.0, job_id="8", submitted_at=900.0, gpus=1), end(2, 960.0, "stopped")]
    assert [row.seconds["queue"] for row in usage_of(*first, *again).attempts] == [10, 50]


def test_gpus_that_were_never_given_back_are_held_meanwhile():
    ledger = [
        start(1, 0.0, job_id="7", restart=0, gpus=1),
        end(1, 20.0, "crashed"),
        start(2, 25.0, job_id="7", restart=0, gpus=1),
        end(2, 60.0, "crashed"),
    ]
    (_, second) = usage_of(*ledger, traces={2: AttemptTrace(ready=30.0)}).attempts
    assert charged(second) == {"start-up": 10, "lost": 30}


def test_a_prologue_of_slurms_is_start_up():
    one = start(1, 60.0, job_id="7", submitted_at=0.0, held_since=10.0, gpus=1)
    (row,) = usage_of(one, end(1, 80.0, "crashed"), traces={1: AttemptTrace(ready=70.0)}).attempts
    assert charged(row) == {"queue": 10, "start-up": 60, "lost": 10}


def test_ranks_that_train_wait_for_the_answers_of_those_that_generate():
    """Two of four GPUs train, one generates, and one is spare."""
    began = {"began": 100.0, "ranks": 2}
    trace = AttemptTrace(timeline=[line(110.0, 0, began), line(130.0, 1, generate=24.0, train=16.0)], left=True)
    ledger = [start(1, 100.0, gpus=4, generating=1), end(1, 130.0, "finished")]
    (usage,) = usage_of(*ledger, traces={1: trace}).attempts
    # 12 s of generation and 8 s of training: the trainers wait for the former, the replica during the latter.
    assert charged(usage)["generate"] == 12.0
    assert charged(usage)["train"] == 16.0
    assert charged(usage)["wait"] == 2 * 12.0 + 8.0 + 20.0


def test_what_waits_in_the_queue_waits_until_now():
    (row,) = usage_of(now=100.0, queued=in_queue("7", 0.0, 4, 100.0)).attempts
    assert (row.attempt, charged(row)) == (None, {"queue": 400})
    *_, row = usage_of(*LEDGER[:2], now=300.0, queued=in_queue("7", 0.0, 4, 300.0)).attempts
    assert charged(row) == {"queue": 4 * (300 - 255)}


TIMES = st.floats(0, 1000)
LINES = st.builds(
    line, TIMES, st.integers(0, 9), st.just({}), generate=st.floats(0, 500), train=st.floats(0, 500), wait=TIMES
)


def with_totals(lines: Sequence[TimelineLine], every: int) -> list[TimelineLine]:
    return [*map(RunningTotal(every).add, lines)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[AttemptStart | AttemptEnd], dict[int, AttemptTrace]]:
    """Attempts whose times come from clocks that agree on nothing."""
    ledger, traces = [], {}
    maybe = st.none() | TIMES
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        submission = {"job_id": draw(st.sampled_from([None, "7", "8"])), "submitted_at": draw(TIMES)}
        gpus, restart = draw(st.integers(1, 8)), draw(st.integers(0, 1))
        facts = {"gpus": gpus, "restart": restart, "generating": draw(st.integers(0, 9))}
        ledger.append(start(attempt, draw(TIMES), held_since=draw(TIMES), **facts, **submission))
        if draw(st.booleans()):
            outcome = draw(st.sampled_from(["drained", "stopped", "crashed", "finished", "lost"]))
            ledger.append(end(attempt, draw(TIMES), outcome))
        lines = draw(st.lists(LINES, max_size=4))
        if lines:
            more = draw(st.sampled_from([{}, {"ranks": 3}, {"began": 50.0, "ranks": 8, "resumed": 3}]))
            lines[0] = lines[0]._replace(**more)
        lines = with_totals(lines, draw(st.integers(1, 4)))
        facts = {name: draw(maybe) for name in ("image", "ready", "asked", "seen")}
        traces[attempt] = AttemptTrace(lines, left=draw(st.booleans()), **facts)
    return ledger, traces


@given(run=runs(), now=TIMES, running=st.booleans(), queued=st.booleans())
def test_the_sums_hold_and_nothing_is_negative_whatever_the_clocks_say(run, now, running, queued):
    usage = gpu_usage(*run, now, running=running, queued=in_queue("7", 5.0, 2, now) if queued else None)
    ends = [row.end for row in usage.attempts]
    for row, before in zip(usage.attempts, [float("-inf"), *ends], strict=False):
        assert before <= row.queued_at <= row.start <= row.end
        assert min(row.seconds.values()) >= 0
        assert set(row.seconds) == set(CATEGORIES)
        held = sum(seconds for name, seconds in row.seconds.items() if name != "queue")
        assert held == pytest.approx(row.gpus * (row.end - row.start))
        assert row.seconds["queue"] == pytest.approx(row.gpus * (row.start - row.queued_at))
    assert sum(usage.total.values()) == pytest.approx(sum(sum(row.seconds.values()) for row in usage.attempts))


@given(
    spans=st.lists(st.tuples(st.floats(0.0, 9.0), LINES), min_size=1, max_size=30),
    every=st.integers(1, 9),
    resumed=st.integers(0, 31),
    gpus=st.integers(1, 8),
    generating=st.integers(0, 9),
)
def test_what_is_read_from_the_end_counts_as_much_as_the_whole_timeline(
    tmp_path_factory, spans, every, resumed, gpus, generating
):
    run = RunDir(tmp_path_factory.mktemp("run"))
    facts = {"gpus": gpus, "generating": generating}
    at, lines = 100.0, []
    for step, (span, one) in enumerate(spans):
        at += span
        lines.append(one._replace(at=at, step=step))
    lines[0] = lines[0]._replace(began=100.0, ranks=3, resumed=0)
    ledger = [
        start(1, 90.0, **facts),
        end(1, at + 5.0, "crashed"),
        start(2, at + 9.0, **facts),
        end(2, at + 99, "lost"),
    ]
    second = [line(at + 20.0, resumed, {"began": at + 10.0, "ranks": 3, "resumed": resumed})]
    for entry in ledger:
        append(run.attempts_ledger, entry)
    for number, its in ((1, with_totals(lines, every)), (2, second)):
        run.attempt(number).folder.mkdir(parents=True)
        for entry in its:
            append(run.attempt(number).timeline, entry)
    whole = gpu_usage(ledger, {1: AttemptTrace(lines), 2: AttemptTrace(second)}, now=1e4)
    found = read_usage(run, now=1e4)
    for mine, theirs in zip(found.attempts, whole.attempts, strict=True):
        assert mine.seconds == pytest.approx(theirs.seconds, abs=1e-9)
        assert mine[:5] == theirs[:5]


def test_the_ranks_record_under_the_same_names():
    assert {"queue", "image", *timeline.CATEGORIES} | {"lost"} == set(CATEGORIES)


def a_run(root: Path) -> RunDir:
    run = make_run(root / "run")
    attempt = run.attempt(1)
    attempt.folder.mkdir(parents=True)
    for entry in LEDGER[:1]:
        append(run.attempts_ledger, entry)
    mark(attempt, image=110.0)
    mark(attempt, ready=130.0)
    for entry in TRACES[1].timeline:
        append(attempt.timeline, entry)
    with attempt.timeline.open("a") as file:
        file.write('{"at": 252.0, "st')
    return run


def test_the_usage_is_read_from_the_runs_own_files(tmp_path):
    run = a_run(tmp_path)
    write(run.attempt(1).drain, Drain("preempted", "me", 245.0))
    write(run.attempt(1).outcome, Outcome("drained", 2))
    append(run.attempts_ledger, LEDGER[1])
    assert read_usage(run, now=260.0) == gpu_usage(LEDGER[:2], {1: TRACES[1]}, now=260.0)


def test_a_run_in_the_queue_asks_for_the_spare_nodes_too(tmp_path):
    run = RunDir(tmp_path)
    write(run.job, Owner("7", "lab", 40.0))
    write(run.plan, PlanRecord(2, 8, 1, []))
    assert charged(read_usage(run, 50.0, queued=True).attempts[0]) == {"queue": 240}


def test_a_heartbeat_is_a_sign_of_life(tmp_path):
    run = a_run(tmp_path)
    write_heartbeat(run.attempt(1).heartbeats, Heartbeat(0, 1, "n1", "train", 1, 1, 255.0, 270.0, 10.0))
    (row,) = read_usage(run, now=9000.0).attempts
    assert row.end == 270.0


def test_status_tells_it_in_one_line_and_the_whole_table_as_json(tmp_path):
    run = a_run(tmp_path)
    append(run.attempts_ledger, LEDGER[1])
    told = status_json(read_status(run, None))
    (said,) = [text for text in status_lines(told) if text.startswith("  goodput")]
    assert said.split(None, 1)[1] == (
        "36% of 15.5 process-minutes: generate 19%, train 12%, reward 2%, log-probs 1%, refit 1%; "
        "start-up 24%, wait 24%, image 6%, load 4%, lost 3%, save 2%, drain 1%; and 10.0 process-minutes in the queue"
    )
    assert told["goodput"]["attempts"][0]["gpus"] == 6
    assert sum(told["goodput"]["gpu_seconds"].values()) == 600 + told["goodput"]["held_gpu_seconds"]


def test_status_says_nothing_of_goodput_where_nothing_was_recorded(tmp_path):
    run = make_run(tmp_path / "run")
    told = status_json(read_status(run, None))
    assert told["goodput"] is None
    assert not any("goodput" in text for text in status_lines(told))
