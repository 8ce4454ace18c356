"""A Ctrl-C is not lost if the disk cannot take the request at once (R4)."""

from __future__ import annotations

import pytest

from launcher.backends.slurm.jobs import JobState
from launcher.cli.show.history import HistoryReader
from launcher.cli.show.progress_lines import ProgressLines
from launcher.cli.show.terminal import Interruptions
from launcher.cli.submit import follow
from launcher.cli.submit.follow import Follower
from launcher.cli.submit.watch import _news
from launcher.runs.state import read_status
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, MetricsLine
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, read


class Supervisor:
    """Supervisor that ends the attempt when requested."""

    pid = 1

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def ended(self) -> bool:
        if self.run.attempt(1).drain.exists():
            append(self.run.attempts_ledger, AttemptEnd(1, 0.0, DRAINED))
        return False


def test_a_request_to_end_is_repeated_until_it_is_written(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    tries = []

    def full_twice(path: object, value: Drain) -> None:
        tries.append(value.cause)
        if len(tries) < 3:
            raise OSError(28, "No space left on device")
        real(path, value)

    real = follow.write
    monkeypatch.setattr(follow, "write", full_twice)
    monkeypatch.setattr(follow, "TICK", 0.001)
    interruptions = Interruptions()
    interruptions.names.append("Ctrl-C")
    follower = Follower(run, run.attempt(1), Supervisor(run), drain_limit_s=60.0)
    end = follower.wait_for_end(HistoryReader(run, run.attempt(1), 1), ProgressLines(), interruptions)
    assert (end.outcome, tries) == (DRAINED, ["Ctrl-C"] * 3)
    assert read(Drain, run.attempt(1).drain).cause == "Ctrl-C"


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([{"time/step_s": 3.0}, {"time/step_s": 0.5, "time/save_s": 2.2}], "Ctrl-C: saving, then ending: about 5 s. "),
        ([{"time/step_s": 3.0}], "Ctrl-C: saving, then ending: the ranks are killed after 660 s. "),
    ],
)
def test_the_announced_time_is_that_of_the_last_save(tmp_path, capsys, steps, said):
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    for number, values in enumerate(steps, 1):
        append(run.metrics, MetricsLine(number, values))
    interruptions = Interruptions()
    interruptions.names.append("Ctrl-C")
    follower = Follower(run, run.attempt(1), Supervisor(run), drain_limit_s=660.0)
    follower.wait_for_end(HistoryReader(run, run.attempt(1), 9), ProgressLines(), interruptions)
    assert f"\n{said}" in capsys.readouterr().out


def test_a_requeued_job_that_starts_is_not_announced_as_its_last_attempt(tmp_path) -> None:
    run = RunDir(tmp_path)
    job = JobState("7", "RUNNING", "running", nodes="n1", started_at=100.0)
    append(run.attempts_ledger, AttemptStart(1, 1.0, job_id="7"))
    run.attempt(1).folder.mkdir(parents=True)
    assert _news(read_status(run, job)) == "job 7 runs on n1, attempt 1"
    append(run.attempts_ledger, AttemptEnd(1, 2.0, DRAINED, job_id="7", then="requeued"))
    assert _news(read_status(run, job)) == "job 7 has started on n1, waiting for its attempt to begin"
