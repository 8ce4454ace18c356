"""Whatever cuts the end of an attempt short, the next start concludes what the end would have: a run neither comes back
after a stop, nor stays away after a preemption, nor forgets that it had finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.host.attempt import begin as begin_module
from launcher.host.attempt import conclude, own, slurm_run, start_again
from launcher.host.attempt.job_context import JobContext, JobRefused
from launcher.host.attempt.own import NothingToDo
from launcher.host.attempt.slurm_job import SlurmJob
from launcher.host.attempt.slurm_run import JobSettings, run_job
from launcher.host.judge.policy import Facts
from launcher.host.judge.verdict import Verdict
from launcher.host.process.signals import Signals
from launcher.host.record.evidence import Observed
from launcher.host.record.ledger import ends_in, read_ledger
from launcher.host.slurm import call, orders, queries
from launcher.host.slurm.call import SlurmRefused, SlurmSilent
from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, Drain, Outcome, RankError, Requeued
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read, write
from megatron_rl.contract.run_records import Done, Owner

NOTHING_TO_DO, GOES_ON = "nothing to do", "goes on"
NEVER = -1
EFFECTS = 4  # more than any end has, so that one case is that of none cut short
FULL = OSError(28, "No space left on device")
STALE = OSError(116, "Stale file handle")


class Killed(BaseException):
    """SIGKILL."""


class World:
    """One run of job 7, and a Slurm that remembers its orders. The effect number `cut` does not happen."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.run = RunDir(root / "run")
        self.run.root.mkdir()
        self.run.resolved.write_text("")
        self.told: list[str] = []
        self.job = {"BatchFlag": "1", "Requeue": "1", "JobState": "RUNNING"}
        self.unfit: dict[str, str] = {}
        self.cut = NEVER
        self.by: BaseException = Killed()
        write(self.run.job, Owner("7", "lab", 0.0))
        patch.setenv("XDG_STATE_HOME", str(root / "state"))
        patch.setattr(call, "ASK_AGAIN_S", 0.0)
        patch.setattr(conclude, "RECORD_AGAIN_S", 0.0)
        patch.setattr(slurm_run, "RETRY_S", 0.0)
        patch.setattr(queries, "show_job", lambda job_id: dict(self.job))
        patch.setattr(queries, "node_states", lambda hosts: dict.fromkeys(hosts, "idle"))
        patch.setattr(queries, "ended_as", lambda job_id, began: None)
        patch.setattr(own, "_has_ended", lambda owner, context: True)  # job 7, where job 8 asks
        patch.setattr(queries, "could_start", lambda script, avoid: True)
        patch.setattr(orders, "requeue", self._effect("requeue"))
        patch.setattr(orders, "postpone", self._effect("postpone"))
        patch.setattr(orders, "exclude", self._effect("exclude"))
        patch.setattr(conclude, "write", self._effect("DONE", write))
        patch.setattr(conclude, "write_line", self._effect("ledger", conclude.write_line))
        patch.setattr(start_again, "write", self._effect("confirm", write))

    def _effect(self, name: str, act: Callable[..., None] | None = None) -> Callable[..., None]:
        def effect(*given: Any, **named: Any) -> None:
            cut_now, self.cut = self.cut == 0, self.cut - 1
            if cut_now and (isinstance(self.by, Killed) or act is not None):  # a full disk does not keep Slurm
                raise self.by
            self.told.append(name)
            if act is not None:
                act(*given, **named)

        return effect

    def context(self, restarts: int = 0, job_id: str = "7", **more: Any) -> JobContext:
        return JobContext(self.run, "lab", job_id, ["n1"], restarts=restarts, batch_host="n1", **more)

    def begin(self, restarts: int = 0) -> None:
        context = self.context(restarts)
        begin_module.begin_attempt(context, begin_module.next_attempt(context))

    def end(self, cut: int, by: BaseException | None = None, code: int = 1) -> None:
        """The host side closes its attempt, and is killed before the effect number `cut`."""
        self.cut, self.by = cut, by or Killed()
        job = SlurmJob(self.context(), notice=60.0, backoff=30.0, outlives_nodes=False)
        job.unfit = self.unfit
        with contextlib.suppress(Killed):
            conclude.close(self.run, self.run.attempt(1), job, Observed(code=code), None, time.monotonic())
        self.cut = NEVER

    def start(self, restarts: int = 1, **named: Any) -> str:
        """The job starts again: what comes of taking the run."""
        try:
            own.own(self.context(restarts, **named)).release()
        except NothingToDo:
            return NOTHING_TO_DO
        return GOES_ON

    def asked(self, cause: str, deadline: float | None = None) -> None:
        write(self.run.attempt(1).drain, Drain(cause, "me", 0.0, deadline))

    def left(self, outcome: str, step: int = 40) -> None:
        write(self.run.attempt(1).outcome, Outcome(outcome, step))

    def failed(self, at: float = 0.0) -> None:
        write(self.run.attempt(1).error(1), RankError(1, "n1", 47, "training", "boom", at=at))

    def all_ends(self) -> list[AttemptEnd]:
        return ends_in(read_ledger(self.run))

    def ends(self) -> list[tuple[str, str | None, str | None]]:
        return [(end.outcome, end.cause, end.then) for end in self.all_ends()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path, monkeypatch)
    made.begin()
    return made


CUTS = pytest.mark.parametrize("cut", range(EFFECTS))
BY = pytest.mark.parametrize("by", [Killed(), FULL, STALE], ids=["killed", "disk full", "stale mount"])


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
    asked = iter([SlurmSilent("busy"), True])

    def could_start(script: str, avoid: Sequence[str]) -> bool:
        world.told.append("which nodes?")
        if isinstance(answer := next(asked), Exception):
            raise answer
        return answer

    monkeypatch.setattr(queries, "could_start", could_start)
    world.asked("bad nodes")
    world.unfit = {"n1": "has no GPU"}
    world.end(NEVER, code=75)
    assert world.told == ["ledger", "which nodes?", "which nodes?", "requeue", "postpone", "exclude", "confirm"]


@pytest.mark.parametrize("problem", [SlurmRefused("no"), STALE])
def test_a_run_comes_back_though_nobody_knows_which_nodes_it_is_to_avoid(world, monkeypatch, problem):
    def fail(*given: Any) -> None:
        raise problem

    monkeypatch.setattr(start_again, "nodes_to_avoid", fail)
    world.asked("bad nodes")
    world.unfit = {"n1": "has no GPU"}
    world.end(NEVER, code=75)
    assert world.told == ["ledger", "requeue", "postpone", "confirm"]
    assert read(Requeued, world.run.attempt(1).requeued).problem == str(problem)


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
    assert read(Done, world.run.done).step == 300
    assert world.start(restarts=0, job_id="8") == NOTHING_TO_DO


@pytest.mark.parametrize("cut", [NEVER, 0], ids=["by the script", "at the next start"])
@pytest.mark.parametrize("left", [True, False])
def test_ranks_ended_at_their_deadline_are_not_to_blame_for_missing_one_another(world, cut, left):
    world.asked("preempted", deadline=100.0)
    world.failed(at=95.3)
    if left:
        world.left("drained")
    world.end(cut, code=-9)
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


def test_a_pause_that_slurm_refused_is_asked_for_at_the_next_start(world, monkeypatch):
    postpone = orders.postpone

    def refuse(job_id: str, start: float) -> None:
        raise SlurmRefused("scontrol update: Job is no longer pending execution")

    monkeypatch.setattr(start_again, "LIMIT_S", 0.0)
    monkeypatch.setattr(orders, "postpone", refuse)
    world.failed()
    world.end(NEVER)
    assert world.told == ["ledger", "requeue", "confirm"]
    assert world.start() == NOTHING_TO_DO, "as often as Slurm refuses, until the pause is over"
    monkeypatch.setattr(orders, "postpone", postpone)
    assert world.start(restarts=2) == NOTHING_TO_DO
    assert world.told[3:] == ["requeue", "confirm", "requeue", "postpone", "confirm"]
    assert world.start(restarts=3) == GOES_ON, "Slurm was told: who starts it sooner wants it sooner"


def test_an_end_is_on_record_before_the_same_process_goes_on_with_another_attempt(world, monkeypatch):
    """Else its line would stand behind theirs, where the last line is what is gone by."""
    written, errors = conclude.write_line, [STALE, STALE]

    def fail_at_first(run: RunDir, line: Any) -> None:
        if errors:
            raise errors.pop()
        written(run, line)

    monkeypatch.setattr(conclude, "write_line", fail_at_first)
    dead = Facts(dead=["n1"], suffice=True)
    conclude.conclude(world.run, world.run.attempt(1), Verdict("lost"), None, dead, conclude.EndContext(time.time()))
    assert world.ends() == [("lost", "node failure", "stays")]


def test_a_job_that_slurm_does_not_take_back_goes_on_without_its_pause(world, monkeypatch):
    """Its end would be that of the run."""

    def refuse(job_id: str) -> None:
        raise orders.NotRequeueable("scontrol requeue 7: Requested operation is presently disabled")

    world.failed()
    world.end(2)
    monkeypatch.setattr(orders, "requeue", refuse)
    assert world.start() == GOES_ON


def test_a_job_that_slurm_requeued_is_not_sent_away_for_the_rest_of_its_pause(world):
    world.end(0)  # a dead script has written no end: the next start does, of a crash without a word
    assert world.start() == GOES_ON
    (end,) = world.all_ends()
    assert end.then == "slurm" and end.not_before > time.time()


def test_a_crash_that_is_held_is_not_started_by_a_requeue_of_its_job(world):
    write(world.run.attempt(1).error(0), RankError(0, "n1", 0, "starting", "no such file", exit_code=78))
    world.end(NEVER)
    with pytest.raises(JobRefused, match=r"no such file; held: .*; mrl resume continues it"):
        world.start()
    assert world.start(restarts=0, job_id="8") == GOES_ON


def test_what_was_refused_is_on_record(world, monkeypatch):
    def refuse(job_id: str) -> None:
        raise SlurmRefused("scontrol requeue 7: Access/permission denied")

    monkeypatch.setattr(orders, "requeue", refuse)
    world.asked("preempted")
    world.left("drained")
    world.end(NEVER)
    assert world.ends() == [("drained", "preempted", "requeue")]
    assert "permission denied" in read(Requeued, world.run.attempt(1).requeued).problem


def test_a_controller_that_is_away_for_a_quarter_of_an_hour_is_waited_for(world, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(call, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    requeue = orders.requeue

    def away(job_id: str) -> None:
        clock[0] += 100.0
        if clock[0] <= 900.0:
            raise SlurmSilent("scontrol requeue 7: Unable to contact slurm controller")
        requeue(job_id)

    monkeypatch.setattr(orders, "requeue", away)
    world.asked("preempted")
    world.left("drained")
    world.end(NEVER)
    assert "requeue" in world.told
    assert read(Requeued, world.run.attempt(1).requeued).problem is None


def test_three_scripts_that_were_killed_without_a_word_are_enough(world):
    for restarts in (1, 2):
        assert world.start(restarts) == GOES_ON
        world.begin(restarts)
    with pytest.raises(JobRefused, match="3 crashes without a new checkpoint"):
        world.start(3)
    assert [outcome for outcome, _, _ in world.ends()] == ["lost"] * 3


@pytest.mark.parametrize(("word", "cause"), [("PREEMPTED", "preempted"), ("NODE_FAIL", "node failure")])
def test_a_script_that_was_killed_for_a_reason_that_slurm_knows_uses_up_nothing(world, monkeypatch, word, cause):
    monkeypatch.setattr(queries, "ended_as", lambda job_id, began: word)
    for restarts in range(1, 6):
        assert world.start(restarts) == GOES_ON
        world.begin(restarts)
    assert world.ends() == [("lost", cause, "slurm")] * 5


def test_a_node_that_is_down_explains_an_end_without_a_word(world, monkeypatch):
    monkeypatch.setattr(queries, "node_states", lambda hosts: {"n1": "down*"})
    assert world.start() == GOES_ON
    (end,) = world.all_ends()
    assert (end.outcome, end.cause, end.error, end.excluded) == (
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
        monkeypatch.setattr(queries, "waiting_for", lambda job_id, name: ["8"] if calls else [])
        monkeypatch.setattr(orders, "submit_successor", lambda *given: calls.append(given) or "8")
        return calls

    def test_it_owns_the_run(self, world, submitted):
        world.asked("time limit")
        world.left("drained")
        world.end(NEVER)
        assert len(submitted) == 1
        assert read(Owner, world.run.job).job_id == "8"
        assert world.start(0, job_id="8", succeeds="7") == GOES_ON

    def test_it_follows_a_job_of_which_slurm_had_not_said_that_it_is_not_requeued(self, world, submitted, monkeypatch):
        def refuse(job_id: str) -> None:
            raise orders.NotRequeueable("scontrol requeue 7: Requested operation is presently disabled")

        monkeypatch.setattr(orders, "requeue", refuse)
        world.job.clear()
        world.asked("time limit")
        world.left("drained")
        world.end(NEVER)
        assert len(submitted) == 1
        assert [end.then for end in world.all_ends()] == ["requeue"]
        assert world.start(0, job_id="8", succeeds="7") == GOES_ON

    def test_an_answer_that_was_lost_is_found_in_the_queue(self, world, submitted, monkeypatch):
        def silent(*given: Any) -> str:
            submitted.append(given)
            raise SlurmSilent("sbatch: timed out")

        monkeypatch.setattr(orders, "submit_successor", silent)
        world.asked("time limit")
        world.left("drained")
        world.end(NEVER)
        assert len(submitted) == 1, "a second one would be a second job"
        assert read(Owner, world.run.job).job_id == "8"

    def test_it_waits_until_slurm_says_which_nodes_it_may_avoid(self, world, submitted, monkeypatch):
        answers = iter([SlurmSilent("sbatch: timed out"), True])

        def could_start(script: str, avoid: Sequence[str]) -> bool:
            if isinstance(answer := next(answers), Exception):
                raise answer
            return answer

        monkeypatch.setattr(queries, "could_start", could_start)
        world.asked("bad nodes")
        world.left("drained")
        world.unfit = {"n1": "no GPU"}
        world.end(NEVER)
        assert [avoid for *_, avoid, _ in submitted] == [["n1"]]

    @pytest.mark.parametrize("cut", [1, 2])
    def test_a_script_killed_before_it_could_name_it_is_succeeded_all_the_same(self, world, submitted, cut):
        world.asked("time limit")
        world.left("drained")
        world.end(cut)
        assert world.start(0, job_id="8", succeeds="7") == GOES_ON

    def test_it_is_there_though_the_disk_takes_no_new_owner(self, world, submitted):
        world.asked("time limit")
        world.left("drained")
        world.end(1, OSError(28, "No space left on device"))
        assert read(Owner, world.run.job).job_id == "7"
        assert world.start(0, job_id="8", succeeds="7") == GOES_ON

    def test_one_that_somebody_else_has_overtaken_has_nothing_to_do(self, world, submitted):
        write(world.run.job, Owner("9", "lab", 0.0))
        assert world.start(0, job_id="8", succeeds="7") == NOTHING_TO_DO

    def test_a_namesake_is_not_taken_for_it(self, monkeypatch):
        waits = ["8|afterany:7(unfulfilled)", "9|afterany:77(unfulfilled)", "10|(null)", "11|afterany:3,afterany:7"]
        rows = [*(f"{row}|run" for row in waits), "12|afterany:7(unfulfilled)|run,2"]
        monkeypatch.setattr(queries, "call", lambda command: "\n".join(rows))
        assert queries.waiting_for("7", "run") == ["8", "11"]


class TestFaultBeforeAnAttempt:
    """A failure before an attempt has begun ends no run: the job comes back, later or without this host."""

    @pytest.fixture
    def fails(self, world, monkeypatch) -> Callable[..., int]:
        """The next start of the job, in which something fails: its exit code."""
        world.asked("preempted")
        world.left("drained")
        world.end(NEVER)
        world.told.clear()

        def run(
            owner: Any, name: str, error: Exception = FULL, restarts: int = 1, act: Any = None, **context: Any
        ) -> int:
            def refuse(*given: Any, **facts: Any) -> None:
                raise error

            settings = JobSettings("spool", 60.0, 30.0, False, None)
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, act or refuse)
                return run_job(world.context(restarts, **context), settings, Signals(()))

        return run

    def test_a_full_disk_sends_the_job_back_for_a_while(self, world, fails, capsys):
        before = world.run.attempts_ledger.read_text()
        assert fails(begin_module, "write_line") == 75
        assert world.told == ["requeue", "postpone"]
        told = capsys.readouterr().err
        assert "No space left on device" in told
        assert "the job comes back in 15 min" in told
        assert world.run.attempts_ledger.read_text() == before

    def test_no_empty_attempts_gather(self, world, fails):
        for _ in range(3):
            fails(begin_module, "write_line")
        assert world.run.last_attempt() == 1
        assert {path.name for path in world.run.attempt(1).logs.parent.iterdir()} == {"attempt-001", "latest"}
        assert world.run.attempt(1).latest_logs.resolve() == world.run.attempt(1).logs.resolve()

    def test_a_start_that_the_disk_kept_although_it_said_that_it_had_not_is_that_of_one_attempt(
        self, world, fails, monkeypatch
    ):
        """And not an attempt by itself, that nobody ends and that would count as a crash."""
        errors = [STALE]

        def keep_and_fail(run: RunDir, line: Any) -> None:
            conclude.write_line(run, line)
            if errors:
                raise errors.pop()

        monkeypatch.setattr(slurm_run, "RETRY_S", 60.0)
        monkeypatch.setattr(slurm_run, "PAUSE_S", 0.0)
        monkeypatch.setattr(begin_module.shutil, "rmtree", lambda *given, **options: None)  # it fails as well
        fails(begin_module, "write_line", act=keep_and_fail)
        lines = read_ledger(world.run)
        assert [line.attempt for line in lines] == [1, 1, 2, 2]
        assert isinstance(lines[-1], AttemptEnd)

    def test_a_job_that_cannot_enter_itself_as_the_owner_is_sent_back_too(self, world, fails):
        assert fails(own, "write_owner", job_id="8") == 75
        assert world.told == ["requeue", "postpone"]

    def test_it_is_tried_though_slurm_does_not_show_the_job(self, world, fails, monkeypatch):
        def refuse(job_id: str) -> dict[str, str]:
            raise SlurmRefused("scontrol: no")

        monkeypatch.setattr(queries, "show_job", refuse)
        assert fails(begin_module, "write_line") == 75
        assert world.told == ["requeue", "postpone"]

    def test_where_it_cannot_come_back_somebody_is_told(self, world, fails, capsys):
        world.job["BatchFlag"] = "0"
        assert fails(begin_module, "write_line") == 75
        assert world.told == []
        assert "nothing is lost, mrl resume continues" in capsys.readouterr().err

    def test_then_it_goes_on(self, world, fails):
        fails(begin_module, "write_line")
        assert world.start(2) == GOES_ON
        world.begin(2)
        assert isinstance(read_ledger(world.run)[-1], AttemptStart)

    @pytest.mark.parametrize(
        ("owner", "name"),
        [
            (own, "read_or_raise"),
            (own, "read_ledger"),
            (conclude, "read_ledger"),
            (own, "conclude_lost"),
            (own, "write_owner"),
            (begin_module, "newest_line"),
            (begin_module, "write_line"),
        ],
    )
    @pytest.mark.parametrize(
        "error",
        [STALE, OSError(5, "Input/output error"), SlurmSilent("no answer"), KeyError("a fault of ours")],
        ids=str,
    )
    def test_whatever_else_fails_sends_it_elsewhere(self, world, fails, owner, name, error, capsys):
        assert fails(owner, name, error, job_id="8" if name == "write_owner" else "7") == 75
        assert world.told == ["requeue", "exclude"]
        assert "nothing is lost: the job comes back without this host" in capsys.readouterr().err

    def test_but_not_for_ever(self, world, fails, capsys):
        codes = [fails(begin_module, "write_line", STALE, restarts) for restarts in range(1, 6)]
        assert codes == [75] * 4 + [1], "the first attempt began with restart 0"
        assert "5 starts in a row failed; nothing is lost, mrl resume continues" in capsys.readouterr().err

    def test_nor_from_successor_to_successor(self, world, fails, monkeypatch):
        world.job["Requeue"] = "0"
        submitted: list[dict[str, str]] = []
        monkeypatch.setattr(queries, "waiting_for", lambda job_id, name: [])
        monkeypatch.setattr(orders, "submit_successor", lambda *given: submitted.append(given[-1]) or "8")
        fails(begin_module, "write_line", STALE)
        assert submitted == [{"MRL_HOST_FAULTS": "1"}]
        assert fails(begin_module, "write_line", STALE, 0, job_id="8", succeeds="7", faults=4) == 1

    def test_a_host_without_the_run_directory_is_left(self, world, monkeypatch):
        elsewhere = world.context()._replace(run=RunDir(world.run.root / "not mounted"))
        with pytest.raises(OSError, match="not the same file system"):
            own.own(elsewhere)
        assert not elsewhere.run.root.exists()
