"""A run directory with every record that the commands read, of a run on Slurm with replicas, without training."""

from __future__ import annotations

from pathlib import Path

from reported_run import make_reported_run

from megatron_rl.contract.attempt_records import (
    AllReduce,
    AttemptStart,
    Drain,
    FabricReport,
    Hang,
    Heartbeat,
    Marks,
    NodeAssignment,
    NodeHealth,
    PairAllReduce,
    Progress,
    RankError,
    ReplicaState,
    Requeued,
)
from megatron_rl.contract.evaluation_records import EvaluationResult, MeanScore, PassRate, SetResult
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.manifest import FileRecord, Manifest, write_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord, PlanRole
from megatron_rl.contract.records import append, write
from megatron_rl.contract.run_records import (
    Fork,
    LessonRecord,
    Notification,
    Owner,
    PromptCounts,
    RecipeChange,
    RightAnswer,
    RunIdentity,
    TrackerRun,
)

AT = 1.8e9
JOB, ID = "4711", "0" * 32


def make_furnished_run(folder: Path, job_id: str | None = JOB) -> RunDir:
    """Write a run whose third attempt has begun. job_id: its Slurm job; None: a run on this machine."""
    run = make_reported_run(folder, steps=12, sampled_every=4)
    run.done.unlink()
    append(run.attempts_ledger, AttemptStart(3, AT, gpus=8, job_id=job_id, nodes=["n1", "n2"]))
    if job_id:
        write(run.job, Owner(job_id, "lab", AT, "me", run_id=ID))
    name_run(run)
    write(run.plan, PlanRecord(2, 8, 1, [PlanRole("train", 0, 1, None, 8), PlanRole("infer", -1, 0, 4, 4)]))
    write(run.fork, Fork(str(folder.parent / "origin"), 5, {"grpo.kl_beta": [0.0, 0.1]}, AT))
    write(run.lesson, LessonRecord(PromptCounts(4, 4, 0, 9, 1, 3, 2), [RightAnswer("1+1=", "2", 1.0)]))
    write(run.tracker("wandb"), TrackerRun("a", "https://example.org/a"))
    append(run.changes, RecipeChange(2, {"training.steps": [10, 12]}, AT))
    append(run.notifications, Notification("finished", "k", "text", 1, AT))
    _third_attempt(run)
    _evaluation(run)
    run.checkpoint(12).mkdir(parents=True)
    (run.checkpoint(12) / "weights").write_text("weights")
    files = {"weights": FileRecord(7, "0" * 64)}
    write_manifest(run.checkpoint(12), Manifest(12, "a", 2, None, 0.1, 0.2, {"policy_version": 12}, files))
    run.latest_checkpoint.write_text("step-000012\n")
    return run


def name_run(run: RunDir) -> None:
    """Make a directory, such as a copy, the run's own."""
    write(run.identity, RunIdentity(ID, str(run.root), run.root.stat().st_ino, AT, "me"))


def _third_attempt(run: RunDir) -> None:
    attempt = run.attempt(3)
    for path in (attempt.folder / "health", attempt.logs, attempt.replica(0).folder):
        path.mkdir(parents=True)
    write(attempt.nodes, NodeAssignment(2, {"train": ["n1"], "infer-0": ["n2"]}, [], {"n3": "its GPU fails"}))
    write(attempt.marks, Marks(AT + 1, AT + 2))
    write(attempt.drain, Drain("preemption", "SIGTERM", AT + 9, AT + 60, AT + 90))
    write(attempt.hang, Hang(3, "n1", "generate", 7, 600.0, AT + 5))
    write(attempt.error(3), RankError(3, "n1", 7, "train", "ValueError: x", "Traceback\nx", log=["a", "b"]))
    write(attempt.fabric, FabricReport(["n1"], {"n3": "slow"}, AllReduce(9.0), [PairAllReduce(["n1", "n2"], 9.0)]))
    write(attempt.health("n1"), NodeHealth("n1", AT, True, [], ["driver"], 8, 1000, 0.1, 400.0))
    write(attempt.progress, Progress("generate", 7))
    write(attempt.requeued, Requeued(AT, ["n3"], None))
    write(attempt.replica(0).state, ReplicaState(0, "ready", 1, AT, ["n2"], "crashed"))
    write_heartbeat(attempt.heartbeats, Heartbeat(0, 8, "n1", "generate", 7, 9, AT, AT, 5.0))
    attempt.log(0).write_text("rank 0 trains\n")
    attempt.image.write_text("/images/a.sqsh\n")


def _evaluation(run: RunDir) -> None:
    run.evaluation_results.mkdir()
    rates = run.evaluation_results / "x.pass_rates.jsonl"
    for number in range(4):
        append(rates, PassRate("", f"{number:012x}", number / 4, 8, f"{number}+1="))
    scored = SetResult(5, 10, {"judge": 1}, {}, {"avg@2": MeanScore(0.5, 0.1, 5)})
    result = EvaluationResult({"checkpoint": {"step": 12}}, {"held_out": scored}, "x.answers.jsonl", str(rates))
    write(run.evaluation_results / "x.json", result)
