"""The black box of a rank: heartbeats, stacks, the error file."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rl.contract.attempt_records import Heartbeat, Progress, RankError
from megatron_rl.contract.codes import EXIT_CONFIG, EXIT_CRASHED
from megatron_rl.contract.heartbeat_files import read_heartbeat
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Absent, Unreadable, read
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import (
    LINE_LIMIT,
    LOG_LINES,
    MESSAGE_LIMIT,
    TRACE_LINES,
    BlackBox,
    LogFormatter,
    heartbeat_period,
    trace,
    waited_in_vain,
)

RANK = """
import logging, sys, threading, time
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.activity import Activity

logging.basicConfig(level=logging.INFO)
attempt = RunDir(sys.argv[1]).attempt(1)
activity = Activity(attempt, published=False)
box = BlackBox(attempt, 3, 8, activity)
box.start()
box.start_heartbeats()
activity.enter("generating", 41)
print("started", flush=True)

def stuck_in_c():
    time.sleep(60)

def works():
    for _ in range(8):
        activity.beat()
        time.sleep(0.05)

{then}
"""


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return RunDir(tmp_path).attempt(1)


def start(attempt: Attempt, then: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RANK.replace("{then}", then), str(attempt.folder.parent.parent)]
    rank = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "started\n"
    return rank


def wait_for(what: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60  # seconds; a busy machine imports slowly
    while not what():
        assert time.monotonic() < give_up, "timed out"
        time.sleep(0.02)


def heartbeat(attempt: Attempt) -> Heartbeat:
    return read_heartbeat(attempt.heartbeats, 3) or Heartbeat(3, 8, None, "", 0, 0, 0.0, 0.0, 0.0)


def error_file(attempt: Attempt) -> RankError:
    found = read(RankError, attempt.error(3))
    assert not isinstance(found, Absent | Unreadable)
    return found


def reported(attempt: Attempt, error: Exception, exit_code: int = EXIT_CRASHED) -> RankError:
    """The error file of a rank that raised `error`."""
    attempt.folder.mkdir(parents=True, exist_ok=True)
    activity = Activity(attempt, published=False)
    activity.enter("training", 41)
    try:
        raise error
    except type(error) as raised:
        BlackBox(attempt, 3, 8, activity).report_failure(raised, exit_code)
    return error_file(attempt)


PLACE = f"test_black_box.py:{reported.__code__.co_firstlineno + 6}: raise error"
"""Place of the error. This file counts as code of the task."""


def test_a_heartbeat_shows_when_the_main_thread_last_made_progress(attempt):
    rank = start(attempt, "stuck_in_c()", MRL_SILENCE_S="0.5")
    try:
        wait_for(lambda: heartbeat(attempt).step == 41)
        stuck = heartbeat(attempt)
        assert (stuck.rank, stuck.ranks, stuck.phase, stuck.entered) == (3, 8, "generating", 1)
        wait_for(lambda: heartbeat(attempt).written > stuck.written + 0.2)
        assert heartbeat(attempt).at == pytest.approx(stuck.at, abs=0.02), "heartbeats continue without progress"
    finally:
        rank.kill()


def test_a_rank_that_works_moves_its_heartbeat_and_ends_with_one_that_says_it_left(attempt):
    rank = start(attempt, "began = time.time(); works(); box.stop()", MRL_SILENCE_S="0.5")
    wait_for(lambda: heartbeat(attempt).step == 41)
    first = heartbeat(attempt).at
    rank.wait(10)
    assert heartbeat(attempt).at > first + 0.1
    assert heartbeat(attempt).phase == "left"


def test_sigquit_dumps_every_thread_even_if_the_main_one_hangs_in_c(attempt):
    rank = start(attempt, "stuck_in_c()")

    def dump() -> str:
        rank.send_signal(signal.SIGQUIT)
        time.sleep(0.1)
        return attempt.stacks(3).read_text()

    try:
        wait_for(lambda: dump().count("in stuck_in_c") >= 2)
        assert "_beat" in attempt.stacks(3).read_text(), "the heartbeat's thread too"
        assert rank.poll() is None, "the rank survives"
    finally:
        rank.kill()


def test_files_that_cannot_be_written_do_not_end_the_rank(attempt, tmp_path):
    (tmp_path / "attempts").write_text("a file where a folder should be")
    (tmp_path / "logs").write_text("the same")
    rank = start(attempt, "works(); box.report_failure(RuntimeError('boom'), 1); sys.exit(5)", MRL_SILENCE_S="0.5")
    _, said = rank.communicate(timeout=60)
    assert rank.returncode == 5
    assert said.count("heartbeats cannot be written") == 1
    assert "boom" in said


def test_the_error_file_names_rank_step_phase_and_error(attempt):
    logging.getLogger().setLevel(logging.INFO)
    report = reported(attempt, ValueError("no such token\nwith details"))
    assert (report.rank, report.step, report.phase, report.exit_code) == (3, 41, "training", EXIT_CRASHED)
    assert report.error == f"ValueError: no such token ({PLACE})"
    assert "with details" in report.traceback
    assert "in reported" in report.traceback
    assert report.host


def test_a_configuration_error_has_its_whole_message_and_no_traceback(attempt):
    attempt.folder.mkdir(parents=True, exist_ok=True)
    of_mrl = ValueError("model:\n  no such field")  # not raised in a task's code
    BlackBox(attempt, 3, 8, Activity(attempt, published=False)).report_failure(of_mrl, EXIT_CONFIG)
    report = error_file(attempt)
    assert report.error == "ValueError: model:\n  no such field"
    assert report.traceback == ""


def test_the_newest_log_lines_are_in_the_error_file(attempt):
    say = "for n in range(200): logging.info('line %d %s', n, 'x' * 5000)\n"
    start(attempt, say + "box.report_failure(RuntimeError('boom'), 1)").communicate(timeout=60)
    log = error_file(attempt).log
    assert len(log) == LOG_LINES
    assert "line 199 xxx" in log[-1]
    assert "line 150 xxx" in log[0]
    assert all(len(line) < LINE_LIMIT + 50 for line in log)


def test_huge_messages_and_tracebacks_are_cut(attempt):
    report = reported(attempt, RuntimeError("x" * 1_000_000))
    assert len(report.error) < MESSAGE_LIMIT + 100
    assert len(report.traceback) < 10_000

    def deeper(n: int) -> None:
        if n:
            deeper(n - 1)
        exec("raise RuntimeError('the end')")

    try:
        deeper(500)
    except RuntimeError as error:
        lines = trace(error).splitlines()
    assert len(lines) <= TRACE_LINES + 1
    assert lines[-1] == "RuntimeError: the end"


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"), True),
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:41077"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (TimeoutError("the verifier timed out"), False),
    ],
)
def test_a_collective_that_timed_out_is_marked_as_the_fault_of_another_rank(error, waited):
    assert waited_in_vain(error) == waited


@pytest.mark.parametrize(("limit", "period"), [(None, 10.0), ("1800", 10.0), ("5", 1.0)])
def test_several_heartbeats_fit_into_the_silence_limit(limit, period):
    assert heartbeat_period(limit) == period


def test_only_a_change_of_phase_is_published_and_a_missing_folder_is_tolerated(attempt, caplog):
    activity = Activity(attempt, published=True)
    activity.enter("training", 1)  # the folder does not exist yet
    assert "live view" in caplog.text
    attempt.folder.mkdir(parents=True)
    activity.enter("training", 2)
    assert not attempt.progress.exists()
    activity.enter("evaluating", 2)
    assert read(Progress, attempt.progress) == Progress("evaluating", 2)
    assert activity.entered == 3


def test_control_characters_of_an_answer_reach_neither_the_log_nor_the_error_file(attempt):
    """An exception may quote the model, whose text could write into the terminal that shows the log."""
    attempt.folder.mkdir(parents=True, exist_ok=True)
    hostile = "bad answer: \x1b]0;owned\x07 \u202e\nsecond line"
    BlackBox(attempt, 3, 8, Activity(attempt, published=False)).report_failure(RuntimeError(hostile), EXIT_CRASHED)
    line = LogFormatter().format(logging.makeLogRecord({"levelname": "ERROR", "msg": hostile}))
    for text in (error_file(attempt).error, error_file(attempt).traceback, line):
        assert r"bad answer: \x1b]0;owned\x07 \u202e" in text
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert line.endswith("\nsecond line")
