"""Whatever cuts the end of an attempt short, the next start concludes what the end would have: a run neither comes back
after a stop, nor stays away after a preemption, nor forgets that it had finished."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.host import job
from launcher.host.attempt import begin, close, conclude, start_again
from launcher.host.attempt.context import Here, Refused
from launcher.host.record import goodput, ledger
from launcher.host.slurm import client
from megatron_rl.contract.paths import RunDir
from megatron_rl.run_dir import read_json, read_json_lines, write_json

NOTHING_TO_DO, GOES_ON = begin.EXIT_NOTHING_TO_DO, 0
NEVER = -1
EFFECTS = 4  # more than any end has, so that one case is that of none cut short


class Killed(BaseException):
    """SIGKILL."""


class World:
    """One run of job 7, and a Slurm that remembers what it was told. The effect number `cut` does not happen."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(root / "run")
        self.run.root.mkdir()
        self.run.resolved.write_text("")
        self.told: list[str] = []
        self.job = {"BatchFlag": "1", "Requeue": "1", "JobState": "RUNNING"}
        self.cut = NEVER
        self.by: BaseException = Killed()
        write_json(self.run.job, {"job_id": "7"})
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(client, "show_job", lambda job_id: dict(self.job))
        patch.setattr(client, "hostnames", lambda nodelist: ["n1"])
        patch.setattr(client, "node_states", lambda hosts: dict.fromkeys(hosts, "idle"))
        patch.setattr(client, "ended_as", lambda job_id, began: None)
        patch.setattr(client, "alive", lambda job_id: False)  # job 7, where job 8 asks
        patch.setattr(client, "version", lambda: [22, 5, 8])
        patch.setattr(client, "requeue", self._effect("requeue"))
        patch.setattr(client, "postpone", self._effect("postpone"))
        patch.setattr(client, "exclude", self._effect("exclude"))
        patch.setattr(conclude, "write_json", self._effect("DONE", write_json))
        patch.setattr(ledger, "end", self._effect("ledger", ledger.end))
        patch.setattr(start_again, "write_json", self._effect("confirm", write_json))
        patch.setattr(goodput, "write", lambda run, now: None)

    def _effect(self, name: str, act: Callable[..., None] | None = None) -> Callable[..., None]:
        def effect(*given: Any, **named: Any) -> None:
            cut_now, self.cut = self.cut == 0, self.cut - 1
            if cut_now and (isinstance(self.by, Killed) or act is not None):  # a full disk does not keep Slurm
                raise self.by
            self.told.append(name)
            if act is not None:
                act(*given, **named)

        return effect

    def here(self, restarts: int = 0, job_id: str = "7", attempt: int = 1, **more: str) -> Here:
        named = {"SLURM_RESTART_COUNT": str(restarts), "MRL_ATTEMPT": str(attempt), **more}
        return Here({"MRL_RUN_DIR": str(self.run.root), "SLURM_JOB_ID": job_id, **named})

    def begin(self) -> None:
        begin.open_attempt(self.here(), argparse.Namespace())

    def end(self, cut: int, by: BaseException | None = None, code: int = 1) -> None:
        """The batch script closes its attempt, and is killed before the effect number `cut`."""
        self.cut, self.by = cut, by or Killed()
        options = {
            "notice": 60.0,
            "backoff": 30.0,
            "began": time.time(),
            "code": str(code),
            "unready": None,
            "here": False,
        }
        with contextlib.suppress(Killed):
            close.close(self.here(), argparse.Namespace(**options))
        self.cut = NEVER

    def start(self, restarts: int = 1, **named: Any) -> int:
        """The script runs again: its exit code of `own`."""
        descriptor = os.open(str(self.run.job_lock), os.O_CREAT | os.O_RDWR)
        try:
            return begin.own(self.here(restarts, **named), argparse.Namespace(lock=descriptor))
        finally:
            os.close(descriptor)

    def asked(self, cause: str, deadline: float | None = None) -> None:
        write_json(self.run.attempt(1).drain, {"cause": cause, "by": "me", "at": 0.0, "deadline": deadline})

    def left(self, outcome: str, step: int = 40) -> None:
        write_json(self.run.attempt(1).outcome, {"outcome": outcome, "step": step})

    def failed(self, at: float = 0.0) -> None:
        error = {"rank": 1, "host": "n1", "step": 47, "phase": "training", "error": "boom", "exit_code": 1, "at": at}
        write_json(self.run.attempt(1).error(1), error)

    def ends(self) -> list[tuple[str, str | None, str]]:
        lines = read_json_lines(self.run.attempts_ledger)
        return [(line["outcome"], line["cause"], line["then"]) for line in lines if line["event"] == "end"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path, monkeypatch)
    made.begin()
    return made


CUTS = pytest.mark.parametrize("cut", range(EFFECTS))
BY = pytest.mark.parametrize("by", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])


@CUTS
@BY
def test_a_run_that_was_stopped_stays_away(world, cut, by):
    world.asked("cancelled")
    world.left("drained")
    world.end(cut, by)
    assert "requeue" not in world.told
    assert world.start() == NOTHING_TO_DO, "though its job was requeued"
    assert world.ends() == [("stopped", "cancelled", "over")]
    assert world.start(restarts=0, job_id="8") == GOES_ON, "somebody has resumed it"


def test_slurm_is_asked_all_there_is_to_ask_while_there_is_time(world, monkeypatch):
    """Seconds after its requeue the script is killed."""
    asked = iter([client.SlurmSilent("busy"), True])

    def could_start(script: str, avoid: Sequence[str]) -> bool:
        world.told.append("which nodes?")
        if isinstance(answer := next(asked), Exception):
            raise answer
        return answer

    monkeypatch.setattr(client, "could_start", could_start)
    monkeypatch.setattr(client, "ASK_AGAIN", 0.0)
    world.asked("bad nodes")
    write_json(world.run.attempt(1).nodes, {"bad": {"n1": "has no GPU"}})
    world.end(NEVER, code=75)
    assert world.told == ["ledger", "which nodes?", "which nodes?", "requeue", "postpone", "exclude", "confirm"]


@pytest.mark.parametrize("problem", [client.SlurmRefused("no"), OSError(116, "Stale file handle")])
def test_a_run_comes_back_though_nobody_knows_which_nodes_it_is_to_avoid(world, monkeypatch, problem):
    def fail(*given: Any) -> None:
        raise problem

    monkeypatch.setattr(start_again, "nodes_to_avoid", fail)
    world.asked("bad nodes")
    write_json(world.run.attempt(1).nodes, {"bad": {"n1": "has no GPU"}})
    world.end(NEVER, code=75)
    assert world.told == ["ledger", "requeue", "postpone", "confirm"]
    assert read_json(world.run.attempt(1).requeued)["problem"] == str(problem)


@CUTS
@BY
def test_a_run_that_was_preempted_comes_back(world, cut, by):
    world.asked("preempted")
    world.left("drained")
    world.end(cut, by)
    ours = "requeue" in world.told
    assert ours or (cut <= 1 and isinstance(by, Killed)), "only a script that is dead cannot requeue its job"
    assert world.start() == GOES_ON  # else Slurm requeued it when the grace time was over, or somebody resumed it
    assert world.ends() in ([("drained", "preempted", "requeue")], [("drained", "preempted", "slurm")])


@CUTS
@BY
def test_a_run_that_had_finished_knows_it(world, cut, by):
    world.left("finished", 300)
    world.end(cut, by)
    assert "requeue" not in world.told
    assert world.start() == NOTHING_TO_DO
    assert read_json(world.run.done)["step"] == 300
    assert world.start(restarts=0, job_id="8") == NOTHING_TO_DO


@pytest.mark.parametrize("cut", [NEVER, 0], ids=["by the script", "at the next start"])
@pytest.mark.parametrize("left", [True, False])
def test_ranks_ended_at_their_deadline_are_not_to_blame_for_missing_one_another(world, cut, left):
    world.asked("preempted", deadline=100.0)
    world.failed(at=95.3)
    if left:
        world.left("drained")
    world.end(cut, code=137)
    assert world.start() == GOES_ON
    ((outcome, cause, _),) = world.ends()
    assert (outcome, cause) == ("drained" if left or cut == NEVER else "lost", "preempted")


def test_a_rank_that_failed_before_its_deadline_did_so_by_itself(world):
    world.asked("preempted", deadline=100.0)
    world.failed(at=80.0)
    world.end(NEVER)
    assert world.ends() == [("crashed", "preempted", "requeue")]


def test_a_pause_that_the_script_could_not_ask_for_is_asked_for_at_the_next_start(world):
    world.failed()
    world.end(2)
    assert world.told == ["ledger", "requeue"]
    assert world.start() == NOTHING_TO_DO, "it is too early, and nodes are not for sleeping in"
    assert world.told[2:] == ["requeue", "postpone", "confirm"]
    assert world.start(restarts=2) == GOES_ON, "Slurm was told: who starts it sooner wants it sooner"


def test_a_crash_that_is_held_is_not_started_by_a_requeue_of_its_job(world):
    write_json(world.run.attempt(1).error(0), {"rank": 0, "error": "no such file", "exit_code": 78, "step": 0})
    world.end(NEVER)
    with pytest.raises(Refused, match=r"no such file; held: .*; mrl resume goes on with it"):
        world.start()
    assert world.start(restarts=0, job_id="8") == GOES_ON


def test_what_was_refused_is_on_record(world, monkeypatch):
    def refuse(job_id: str) -> None:
        raise client.SlurmRefused("scontrol requeue 7: Requested operation is presently disabled")

    monkeypatch.setattr(client, "requeue", refuse)
    world.asked("preempted")
    world.left("drained")
    world.end(NEVER)
    assert world.ends() == [("drained", "preempted", "requeue")]
    assert "presently disabled" in read_json(world.run.attempt(1).requeued)["problem"]


def test_a_controller_that_is_away_for_a_quarter_of_an_hour_is_waited_for(world, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    requeue = client.requeue

    def away(job_id: str) -> None:
        clock[0] += 100.0
        if clock[0] <= 900.0:
            raise client.SlurmSilent("scontrol requeue 7: Unable to contact slurm controller")
        requeue(job_id)

    monkeypatch.setattr(client, "requeue", away)
    world.asked("preempted")
    world.left("drained")
    world.end(NEVER)
    assert "requeue" in world.told
    assert read_json(world.run.attempt(1).requeued)["problem"] is None


def test_three_scripts_that_were_killed_without_a_word_are_enough(world):
    for restarts in (1, 2):
        assert world.start(restarts) == GOES_ON
        begin.open_attempt(world.here(restarts), argparse.Namespace())
    with pytest.raises(Refused, match="3 crashes without a new checkpoint"):
        world.start(3)
    assert [outcome for outcome, _, _ in world.ends()] == ["lost"] * 3


@pytest.mark.parametrize(("word", "cause"), [("PREEMPTED", "preempted"), ("NODE_FAIL", "node failure")])
def test_a_script_that_was_killed_for_a_reason_that_slurm_knows_uses_up_nothing(world, monkeypatch, word, cause):
    monkeypatch.setattr(client, "ended_as", lambda job_id, began: word)
    for restarts in range(1, 6):
        assert world.start(restarts) == GOES_ON
        begin.open_attempt(world.here(restarts), argparse.Namespace())
    assert world.ends() == [("lost", cause, "slurm")] * 5


def test_a_node_that_is_down_explains_an_end_without_a_word(world, monkeypatch):
    monkeypatch.setattr(client, "node_states", lambda hosts: {"n1": "down*"})
    assert world.start() == GOES_ON
    (end,) = [line for line in read_json_lines(world.run.attempts_ledger) if line["event"] == "end"]
    assert (end["outcome"], end["cause"], end["error"], end["excluded"]) == (
        "lost",
        "node failure",
        "n1 went down",
        ["n1"],
    )


class TestSuccessor:
    @pytest.fixture
    def submitted(self, world, monkeypatch) -> list[tuple[Any, ...]]:
        world.job["Requeue"] = "0"
        calls: list[tuple[Any, ...]] = []
        monkeypatch.setattr(client, "waiting_for", lambda job_id, name: ["8"] if calls else [])
        monkeypatch.setattr(client, "succeed", lambda *given: calls.append(given) or "8")
        return calls

    def test_it_owns_the_run(self, world, submitted):
        world.asked("time limit")
        world.left("drained")
        world.end(NEVER)
        assert len(submitted) == 1
        assert read_json(world.run.job)["job_id"] == "8"
        assert world.start(0, job_id="8", MRL_SUCCEEDS="7") == GOES_ON

    def test_an_answer_that_was_lost_is_found_in_the_queue(self, world, submitted, monkeypatch):
        def silent(*given: Any) -> str:
            submitted.append(given)
            raise client.SlurmSilent("sbatch: timed out")

        monkeypatch.setattr(client, "succeed", silent)
        world.asked("time limit")
        world.left("drained")
        world.end(NEVER)
        assert len(submitted) == 1, "a second one would be a second job"
        assert read_json(world.run.job)["job_id"] == "8"

    def test_it_waits_until_slurm_says_which_nodes_it_may_avoid(self, world, submitted, monkeypatch):
        answers = iter([client.SlurmSilent("sbatch: timed out"), True])

        def could_start(script: str, avoid: Sequence[str]) -> bool:
            if isinstance(answer := next(answers), Exception):
                raise answer
            return answer

        monkeypatch.setattr(client, "could_start", could_start)
        monkeypatch.setattr(client, "ASK_AGAIN", 0.0)
        world.asked("bad nodes")
        world.left("drained")
        write_json(world.run.attempt(1).nodes, {"bad": {"n1": "no GPU"}})
        world.end(NEVER)
        assert [avoid for *_, avoid in submitted] == [["n1"]]

    @pytest.mark.parametrize("cut", [1, 2])
    def test_a_script_killed_before_it_could_name_it_is_succeeded_all_the_same(self, world, submitted, cut):
        world.asked("time limit")
        world.left("drained")
        world.end(cut)
        assert world.start(0, job_id="8", MRL_SUCCEEDS="7") == GOES_ON

    def test_it_is_there_though_the_disk_takes_no_new_owner(self, world, submitted):
        world.asked("time limit")
        world.left("drained")
        world.end(1, OSError(28, "No space left on device"))
        assert read_json(world.run.job)["job_id"] == "7"
        assert world.start(0, job_id="8", MRL_SUCCEEDS="7") == GOES_ON

    def test_one_that_somebody_else_has_overtaken_has_nothing_to_do(self, world, submitted):
        write_json(world.run.job, {"job_id": "9"})
        assert world.start(0, job_id="8", MRL_SUCCEEDS="7") == NOTHING_TO_DO

    def test_a_namesake_is_not_taken_for_it(self, monkeypatch):
        rows = ["8 afterany:7(unfulfilled)", "9 afterany:77(unfulfilled)", "10 (null)", "11 afterany:3,afterany:7"]
        monkeypatch.setattr(client, "_run", lambda command: "\n".join(rows))
        assert client.waiting_for("7", "run") == ["8", "11"]


class TestFullDiskAtTheStart:
    """The run goes on by itself once there is room, as it was left."""

    @pytest.fixture
    def full(self, world, monkeypatch) -> Callable[..., int]:
        world.asked("preempted")
        world.left("drained")
        world.end(NEVER)
        assert world.start() == GOES_ON
        world.told.clear()

        def run(command: str, fails: tuple[Any, str], job_id: str = "7") -> int:
            def refuse(*given: Any, **facts: Any) -> None:
                raise OSError(28, "No space left on device", "a file")

            environ = {"MRL_RUN_DIR": str(world.run.root), "SLURM_JOB_ID": job_id, "SLURM_RESTART_COUNT": "1"}
            with monkeypatch.context() as patch, world.run.job_lock.open("w") as lock:
                for name, value in environ.items():
                    patch.setenv(name, value)
                patch.setattr(*fails, refuse)
                return job.main([command, f"--lock={lock.fileno()}"] if command == "own" else [command])

        return run

    def test_the_job_is_sent_back_for_a_while(self, world, full, capsys):
        before = world.run.attempts_ledger.read_text()
        assert full("open", (ledger, "record")) == 75
        assert world.told == ["requeue", "postpone"]
        told = capsys.readouterr()
        assert told.out == "", "the script would take it for the number of an attempt"
        assert "No space left on device" in told.err
        assert "the job comes back in 15 min" in told.err
        assert world.run.attempts_ledger.read_text() == before

    def test_no_empty_attempts_gather(self, world, full):
        for _ in range(3):
            full("open", (ledger, "record"))
        assert world.run.last_attempt() == 1
        assert {path.name for path in world.run.attempt(1).logs.parent.iterdir()} == {"attempt-001", "latest"}
        assert world.run.attempt(1).latest_logs.resolve() == world.run.attempt(1).logs.resolve()

    def test_a_job_that_cannot_enter_itself_as_the_owner_is_sent_back_too(self, world, full):
        assert full("own", (start_again, "write_json"), job_id="8") == 75
        assert world.told == ["requeue", "postpone"]

    def test_it_is_tried_though_slurm_does_not_show_the_job(self, world, full, monkeypatch):
        def refuse(job_id: str) -> dict[str, str]:
            raise client.SlurmRefused("scontrol: no")

        monkeypatch.setattr(client, "show_job", refuse)
        assert full("open", (ledger, "record")) == 75
        assert world.told == ["requeue", "postpone"]

    def test_where_it_cannot_come_back_somebody_is_told(self, world, full, capsys):
        world.job["BatchFlag"] = "0"
        assert full("open", (ledger, "record")) == 75
        assert world.told == []
        assert "make room, mrl resume goes on" in capsys.readouterr().err

    def test_then_it_goes_on(self, world, full):
        full("open", (ledger, "record"))
        assert world.start(2) == GOES_ON
        assert begin.open_attempt(world.here(2), argparse.Namespace()) == 0
        assert read_json_lines(world.run.attempts_ledger)[-1]["event"] == "start"
