"""Status of a run, as data for --json and as lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from launcher.cli.show.ending import once_corrected
from launcher.cli.show.history import RECENT, HistoryReader, clock, mean, replicas_json
from launcher.cli.show.scores import brief, result_of, scores_in_words, scores_json
from launcher.errors import BadInput
from launcher.explain.record import scores_of
from launcher.host.attempt.start_again import excluded_since
from launcher.host.record.accounting import USEFUL
from launcher.host.record.goodput import read_usage
from launcher.host.record.ledger import read_ledger
from launcher.host.slurm.call import SlurmRefused
from launcher.host.slurm.queries import avoided_nodes, show_job
from launcher.runs.find import pasteable_command
from launcher.runs.slow_ranks import read_slow_ranks
from launcher.runs.state import RunStatus, last_line, resolved_values
from megatron_rl.contract.attempt_records import AttemptEnd, MetricsLine
from megatron_rl.contract.codes import MISCONFIGURED, REPLICA_FINISHED, REPLICA_GIVEN_UP
from megatron_rl.contract.learning import Hindrance
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import UnreadableRecord
from megatron_rl.contract.text import moment


def status_json(status: RunStatus) -> dict[str, Any]:
    run, job = status.run, status.job
    history = HistoryReader(run, run.attempt(status.attempt), status.steps).poll()
    unread = [*status.unread, *history.unread]
    goodput = _goodput(status, unread)
    details = _details(run, job.job_id, unread) if job and job.kind in ("pending", "running") else {}
    rewards = history.rewards[-RECENT:]
    unfinished = status.state in ("running", "requeued", "queued") and status.steps
    result = result_of(run)
    newest = history.evaluations[-1] if history.evaluations else None
    return {
        "run": status.name,
        "run_dir": str(run.root.absolute()),
        "cluster": status.cluster or None,
        "state": status.state,
        "reason": status.reason or None,
        "next": _next(status),
        "waits_for": status.waits_for or None,
        "attempt": status.attempt,
        "phase": history.phase if status.state in ("running", "saving") else None,
        "step": history.step,
        "steps": status.steps or None,
        "mean_reward": mean(rewards) if rewards else None,
        "scores": {"step": newest.step, "sets": scores_of(newest)} if newest else None,
        "warnings": [warning._asdict() for warning in history.warnings],
        "slow_ranks": [{**one._asdict(), "seen": str(one)} for one in read_slow_ranks(run)],
        "eta_s": history.eta_s() if unfinished else None,
        "replicas": replicas_json(run.attempt(status.attempt)) if status.state in ("running", "saving") else [],
        "goodput": goodput,
        "job": job
        and {
            "id": job.job_id,
            "state": job.word or job.kind,
            "reason": job.reason or None,
            "restarts": job.restarts,
            "nodes": job.nodes or None,
            "started_at": job.started_at,
            "ends_at": job.ended_at,
            **details,
        },
        "evaluation": result and scores_json(result),
        "unread": unread,
        "logs": str(run.attempt(status.attempt).logs if status.attempt else run.batch_log),
    }


def _goodput(status: RunStatus, unread: list[str]) -> dict[str, Any] | None:
    """Return the use of GPU-seconds; None before there is a timeline. `unread`: gets the reason if it cannot be
    determined."""
    run = status.run
    running, queued = status.state in ("running", "saving", "unknown"), status.state in ("queued", "requeued")
    try:
        if not any(run.attempt(number).timeline.exists() for number in run.attempt_numbers()):
            return None
        job = resolved_values(run).get("job")
        device = "GPU" if isinstance(job, dict) and job.get("device") == "cuda" else "process"
        return {"device": device, **read_usage(run, time.time(), running, queued).as_json()}
    except UnreadableRecord as error:
        unread.append(str(error))
    except OSError as error:
        unread.append(f"{error.filename or run.root}: {error.strerror}")
    except BadInput as error:
        unread += error.problems
    return None


def _details(run: RunDir, job_id: str, unread: list[str]) -> dict[str, Any]:
    """Return facts that squeue does not show: excluded nodes, with the time since when if the run excluded them, and
    whether the job is being preempted. `unread`: gets the reason if they cannot be read."""
    try:
        record = show_job(job_id)
        avoids, since = avoided_nodes(record), excluded_since(read_ledger(run))
    except (SlurmRefused, UnreadableRecord) as error:
        unread.append(str(error))
        return {}
    preempted_at = record.get("PreemptTime")
    return {
        "avoids": {host: since.get(host) for host in avoids},
        "preempted_at": None if preempted_at in (None, "", "(null)", "None") else preempted_at,
    }


def status_lines(data: dict[str, Any]) -> list[str]:
    rows = [("reason", data["reason"]), ("waits for", data["waits_for"]), ("job", _job(data))]
    rows.append(("avoids", _avoids(data)))
    rows.append(("phase", data["phase"]))
    rows += [("replica", line) for line in replica_lines(data["replicas"], time.time())]
    if data["step"]:
        share = f" of {data['steps']} ({data['step'] / data['steps']:.0%})" if data["steps"] else ""
        rows.append(("step", f"{data['step']}{share}"))
    if data["mean_reward"] is not None:
        rows.append(("reward", f"{data['mean_reward']:.3f}, mean over the last {min(RECENT, data['step'])} steps"))
    if scored := data["scores"]:
        values = {f"eval/{name}/{score}": value for name, its in scored["sets"].items() for score, value in its.items()}
        rows.append(("scores", f"after step {scored['step']}: {scores_in_words(MetricsLine(scored['step'], values))}"))
    rows += [("warning", str(Hindrance(**warning))) for warning in data["warnings"]]
    rows += [("slow rank", one["seen"]) for one in data["slow_ranks"]]
    rows += [("result", f"{name}: {brief(scores)}") for name, scores in (data["evaluation"] or {}).items()]
    if data["eta_s"]:
        rows.append(("left", f"about {clock(data['eta_s'])} of run time"))
    if data["goodput"] and data["goodput"]["shares"]:
        rows.append(("goodput", _shares(data["goodput"])))
    rows += [("not read", problem) for problem in data["unread"]]
    rows += [("directory", data["run_dir"]), ("logs", data["logs"]), ("next", data["next"])]
    return [f"{data['run']}: {data['state']}", *(f"  {name:<10} {value}" for name, value in rows if value)]


def _job(data: dict[str, Any]) -> str | None:
    job = data["job"]
    if job is None:
        return None
    parts = [f"{job['id']} on {data['cluster'] or 'an unknown cluster'}, {job['state']}"]
    if job["reason"]:
        parts[0] += f" ({job['reason']})"
    if job["nodes"]:
        parts.append(job["nodes"])
    if data["attempt"]:
        parts.append(f"attempt {data['attempt']}")
    if job["restarts"]:
        parts.append("requeued once" if job["restarts"] == 1 else f"requeued {job['restarts']} times")
    if job.get("preempted_at"):
        parts.append(f"being preempted since {job['preempted_at']}")
    return ", ".join(parts)


def _avoids(data: dict[str, Any]) -> str | None:
    avoids = (data["job"] or {}).get("avoids") or {}
    ours = {host: since for host, since in avoids.items() if since is not None}
    parts = [f"{host} since {moment(since, '%d %B %H:%M')}" for host, since in ours.items()]
    theirs = len(avoids) - len(ours)
    parts += [f"{theirs} node{'s' if theirs > 1 else ''} as submitted"] if theirs else []
    return ", ".join(parts)


def _shares(table: dict[str, Any]) -> str:

    def amount(seconds: float) -> str:
        unit, size = ("hours", 3600) if seconds >= 3600 else ("minutes", 60)
        return f"{seconds / size:,.1f} {table['device']}-{unit}"

    def named(useful: bool) -> str:
        shares = sorted(table["shares"].items(), key=lambda share: -share[1])
        chosen = [(name, share) for name, share in shares if (name in USEFUL) == useful]
        return ", ".join(f"{name} {share:.0%}" for name, share in chosen if share >= 0.005)

    parts = "; ".join(filter(None, (named(True), named(False))))
    queue = table["gpu_seconds"]["queue"]
    waited = f"; and {amount(queue)} in the queue" if queue >= 1 else ""
    return f"{table['goodput']:.0%} of {amount(table['held_gpu_seconds'])}: {parts}{waited}"


def _next(status: RunStatus) -> str | None:
    if status.state in ("stopped", "failed", "cancelled", "lost", "new"):
        resume = pasteable_command("resume", status.name)
        newest = last_line(status.run) if status.state == "failed" else None
        misconfigured = isinstance(newest, AttemptEnd) and newest.outcome == MISCONFIGURED
        return once_corrected(status.run, resume) if misconfigured else resume
    if status.state == "finished" and result_of(status.run) is None:
        key = "training.early_stop.patience" if status.reason else "training.steps"
        return f"{pasteable_command('resume', status.name, f'{key}=N')} trains more"
    return None


def replica_lines(data: Sequence[dict[str, Any]], now: float) -> list[str]:
    """Format one line per replica:

        infer-0: answers at 10.0.0.5:40211 for 3:10
        infer-1: given up after 6 starts, infer-1 rank 0 on node05: ...

    Args:
        data: returned by `replicas_json`.
    """
    return [f"{one['name']}: {_replica_line(one, now)}" for one in data]


def _replica_line(one: dict[str, Any], now: float) -> str:
    where = f" at {one['address']}" if one["address"] else f" on {', '.join(one['hosts'])}" if one["hosts"] else ""
    span = f" for {clock(max(0.0, now - one['at']))}" if one["at"] else ""
    if one["state"] == REPLICA_FINISHED:
        return "finished"
    if one["state"] == REPLICA_GIVEN_UP:
        return f"given up after {_starts(one)}; {one['why']}"
    again = f", {_starts(one)}; the last one ended: {one['why']}" if one["why"] else ""
    return f"{one['phase'] or one['state']}{where}{span}{again}"


def _starts(one: dict[str, Any]) -> str:
    return "1 start" if one["starts"] == 1 else f"{one['starts']} starts"
