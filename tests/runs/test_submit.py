"""mrl-submit from start to end, with fake ranks."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import Command
from run_helpers import fake_ranks
from waiting import until

from launcher.host.process.lock import owner_of
from launcher.host.process.processes import start_time
from megatron_rl.contract.attempt_records import LEDGER, MetricsLine, Outcome
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read, read_lines


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Command]]:
    """Start mrl-submit in an empty directory, in its own process group as a shell would."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    started: list[Command] = []

    def submit(script: str, *arguments: str, **options) -> Command:
        streams = {"stderr": subprocess.STDOUT, **options}
        started.append(Command(["mrl-submit", *arguments], before=fake_ranks(script), **streams))
        return started[-1]

    yield submit
    for process in started:
        process.kill()
        process.wait()
    for lock in tmp_path.rglob(".lock"):
        until(lambda lock=lock: owner_of(lock) is None)


def rank_pids(root: str, attempt: int = 1) -> list[int]:
    folder = RunDir(root).attempt(attempt).folder
    until(lambda: all((folder / f"pid.{rank}").exists() for rank in range(2)))
    until(lambda: len(read_lines(MetricsLine, RunDir(root).metrics).records) > 2)
    return [int((folder / f"pid.{rank}").read_text()) for rank in range(2)]


def finish(process: Command) -> tuple[int, str]:
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def test_finished_run_prints_its_results_and_leaves_no_temporary_files(submit, tmp_path):
    code, output = finish(submit("train", "demo", "training.steps=5"))
    assert code == 0, output
    (root,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"demo-\d{8}-\d{6}", root.name)
    assert "step 5/5  reward 1.000  loss 0.1000  1,000 tokens/s" in output
    assert "finished: 5 steps" in output
    assert "mean reward:     0.600 (first 5 steps) -> 0.600 (last 5)" in output
    assert "greedy accuracy: 0.000 -> 1.000 on held_out" in output
    assert f"tensorboard --logdir {root.relative_to(tmp_path)}/tensorboard" in output
    assert RunDir(root).done.exists()
    assert not list((tmp_path / "tmp").iterdir()), "temporary files are left"


def test_crash_shows_the_error_and_the_log(submit):
    code, output = finish(submit("train,crash", "demo", "--run-dir", "r"))
    assert code == 1
    assert "failed: rank 1 in step 3 (training): RuntimeError: boom" in output
    assert "  | Traceback (most recent call last):" in output
    assert "log: r/logs/attempt-001/train.1.log" in output
    assert "resume:      mrl-submit demo --run-dir r" in output


def test_crash_without_an_error_file_shows_the_end_of_the_log(submit):
    code, output = finish(submit("liar,segfault", "demo", "--run-dir", "r"))
    assert code == 1
    assert "failed: rank 1: it was killed by SIGSEGV" in output
    assert "  | rank 1 is here" in output


def test_configuration_refused_by_the_ranks_is_bad_input(submit):
    code, output = finish(submit("misconfigured", "demo", "--run-dir", "r"))
    assert code == 2
    assert "ConfigurationError: no such tokenizer" in output
    assert output.rstrip().endswith("next:        correct it, then mrl-submit demo --run-dir r")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_run_is_saved_and_the_printed_command_resumes_it(submit, signum, monkeypatch):
    process = submit("long", "demo", "--run-dir", "r", "training.seed=3")
    rank_pids("r")
    os.killpg(process.pid, signum)  # as a terminal does: the whole process group gets it
    code, output = finish(process)
    assert code == 130
    assert read(Outcome, RunDir("r").attempt(1).outcome).outcome == "drained"
    if signum == signal.SIGHUP:
        assert "saved" not in output, "there is no terminal to print it on"
    if signum != signal.SIGINT:
        return
    hint = output.partition("resume:")[2].strip()
    assert hint == "mrl-submit demo training.seed=3 --run-dir r"

    steps = read_lines(MetricsLine, RunDir("r").metrics).records[-1].step
    monkeypatch.setenv("FAKE_STEPS", str(steps + 3))
    code, output = finish(submit("train", *shlex.split(hint)[1:]))
    assert code == 0, output
    assert "attempt 2" in output


def test_second_ctrl_c_kills_the_ranks(submit):
    process = submit("stubborn", "demo", "--run-dir", "r")
    folder = RunDir("r").attempt(1).folder
    until(lambda: (folder / "pid.1").exists())
    os.killpg(process.pid, signal.SIGINT)
    until(lambda: (folder / "drain.json").exists())
    os.killpg(process.pid, signal.SIGINT)
    code, output = finish(process)
    assert code == 130
    assert "killing the ranks" in output
    assert "\nkilled before it could save: second Ctrl-C\n" in output
    assert "within 0 s" not in output
    assert start_time(int((folder / "pid.1").read_text())) is None


def test_killed_mrl_submit_loses_nothing_and_leaves_no_process(submit):
    process = submit("long", "demo", "--run-dir", "r")
    pids = rank_pids("r")
    process.kill()
    until(lambda: not any(map(start_time, pids)))
    until(lambda: len(read_lines(LEDGER, RunDir("r").attempts_ledger).records) == 2)
    assert read_lines(LEDGER, RunDir("r").attempts_ledger).records[-1].outcome == "drained"


def test_detached_run_continues_and_holds_no_pipe(submit):
    code, output = finish(submit("long", "demo", "--run-dir", "r", "--detach"))
    assert code == 0
    pids = rank_pids("r")
    time.sleep(0.5)
    assert all(map(start_time, pids))
    code, text = finish(submit("long", "demo", "--run-dir", "r"))
    assert (code, "in use by the supervisor of attempt 1" in text) == (2, True)
    stop = re.search(r"kill (\d+)", output)
    os.kill(int(stop[1]), signal.SIGTERM)
    until(lambda: not any(map(start_time, pids)))


def test_closed_pipe_does_not_end_the_run(submit):
    process = submit("train", "demo", "--run-dir", "r", "training.steps=5")
    assert process.stdout.readline().startswith("starting demo")
    process.stdout.close()  # as `head -1` does
    assert process.wait(timeout=30) == 0
    assert RunDir("r").done.exists()


def test_bad_input_is_one_message_per_problem_and_code_2(submit, tmp_path):
    code, output = finish(submit("crash", "demo", "grpo.group_sizes=8", "training.stepz=1"))
    assert code == 2
    assert output.splitlines() == [
        "error: override 'grpo.group_sizes=8': grpo.group_sizes: unknown key (did you mean group_size?)",
        "error: override 'training.stepz=1': training.stepz: unknown key (did you mean steps?)",
    ]
    assert not (tmp_path / "runs").exists()
