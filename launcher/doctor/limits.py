"""Whether Slurm can start the job: partition, time and size. What sbatch refuses at once, such as an unknown account,
is its own to say (backends/slurm/reasons.py). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.backends.slurm import reasons as refusal
from launcher.backends.slurm.cluster_facts import Fields, number, tres
from launcher.cluster.profile import Profile
from launcher.doctor.cluster import Cluster, JobTarget
from launcher.doctor.demand import Demand
from launcher.doctor.finding import DoctorFinding, count, error, note, ok, span, warning
from launcher.host.slurm.formats import time_limit_s

SIGNAL_SLACK_S = 60  # Slurm may send --signal this many seconds early, but never late
REFUSED = "sbatch refuses it"
WAITS = "the job would never start"
TRES_LIMITS = {
    "GrpTRES": "GrpTRES",
    "MaxTRES": "MaxTRESPerJob",
    "MaxTRESPU": "MaxTRESPerUser",
    "MaxTRESPA": "MaxTRESPerAccount",
}
"""Column of sacctmgr -> name of the limit."""


def no_partition(cluster: Cluster, name: str | None) -> DoctorFinding:
    """Error for a partition that does not exist; None: the profile names none, and the cluster has no default."""
    if name is None:
        known = ", ".join(sorted(cluster.partitions)) or "none that you may see"
        text = f"the profile names none and the cluster has no default; there are: {known}"
        return error("partition", text, "set partition: in the profile")
    text, hint = refusal.no_partition(name, cluster.partitions)
    return error("partition", text, hint or "set partition: in the profile to one of these")


def state(target: JobTarget, profile: Profile) -> DoctorFinding:
    name = target.name
    state = target.partition.get("State", "UP")
    if state in ("DRAIN", "INACTIVE"):
        return error("partition", f"{name} accepts no new jobs (State={state})", "wait, or choose another partition")
    if state == "DOWN":
        text = f"{name} starts no jobs at the moment (State=DOWN), so this one would wait"
        return warning("partition", text, "ask the administrators, or wait")
    return ok("partition", f"{name}{'' if profile.partition else ', the default of the cluster'}")


def time_limit(cluster: Cluster, target: JobTarget, profile: Profile, demand: Demand) -> Iterator[DoctorFinding]:
    caps = _time_caps(cluster, target)
    limit, source = demand.time_limit_s, demand.time_limit_key
    if limit is None:
        limit = time_limit_s(target.partition.get("DefaultTime")) or min((cap.seconds for cap in caps), default=None)
        source = "the default there"
    if limit is None:
        yield note("time limit", f"none: an attempt of {demand.who} ends only on preemption, failure or mrl cancel")
        return
    over = [cap for cap in caps if cap.seconds < limit]
    for cap in over:
        yield error(
            "time limit",
            f"{span(limit)} ({source}) exceeds the {span(cap.seconds)} of {cap.source} ({cap.key}): {cap.outcome}",
            f"set {demand.time_limit_key} to {_slurm_time(cap.seconds)} or less; the run continues in the next attempt",
        )
    if not over:
        yield ok("time limit", f"each attempt runs up to {span(limit)} ({source}), then saves and is requeued")
        yield _end_notice(profile, demand, limit)


def _end_notice(profile: Profile, demand: Demand, limit_s: int) -> DoctorFinding:
    notice = f"{span(profile.signal_s)} before it (signal_s; Slurm may be up to {SIGNAL_SLACK_S} s early)"
    fix = "set signal_s in the profile to more than the time of a step and a save"
    if profile.signal_s >= limit_s:
        return error("time limit", f"the signal to save comes {notice}, so no attempt could do any work", fix)
    if demand.write_s is not None and demand.write_s > profile.signal_s:
        text = (
            f"the signal to save comes {notice}, but a checkpoint takes about {span(demand.write_s)}: each time limit "
            f"loses {demand.loss}"
        )
        return warning("time limit", text, fix)
    return ok("time limit", f"the signal to save comes {notice}: the current step and a save must fit in")


def sizes(cluster: Cluster, target: JobTarget, demand: Demand) -> Iterator[DoctorFinding]:
    row = target.partition
    most, least = number(row.get("MaxNodes"), 0), number(row.get("MinNodes"), 0)
    if most and demand.nodes > most:
        text = f"{count(demand.nodes, 'node')} exceed the {most} that partition {target.name} gives one job (MaxNodes)"
        yield error("size", text, "lower job.nodes (and job.spare_nodes), or choose another partition")
    if demand.nodes < least:
        text = f"{count(demand.nodes, 'node')} are fewer than the {least} that {target.name} requires (MinNodes)"
        yield error("size", text, "choose another partition")
    if cluster.qos is None:
        return
    if not cluster.limits_kept:
        yield ok("limits", "this cluster enforces no limits of accounts and QOS (AccountingStorageEnforce)")
        return
    broken = [problem for source, limits in _limit_rows(target) for problem in _broken(source, limits, target, demand)]
    yield from broken
    jobs = number(target.qos.get("MaxJobsPU"), 0)
    if jobs:
        whose = f"MaxJobsPerUser of QOS {target.qos_name}"
        text = f"at most {count(jobs, 'job')} of yours can run at a time ({whose}), so the jobs of a sweep take turns"
        yield note("limits", text)
    if not broken:
        yield ok(
            "limits", f"the request ({demand.needed}) is within the limits of your account and QOS {target.qos_name}"
        )


@dataclass(frozen=True, slots=True)
class _Cap:
    seconds: int
    source: str
    key: str
    outcome: str


def _time_caps(cluster: Cluster, target: JobTarget) -> list[_Cap]:
    refused = cluster.config.get("EnforcePartLimits", "NO") != "NO"
    rows = [(f"partition {target.name}", target.partition, "MaxTime", REFUSED if refused else WAITS)]
    if cluster.limits_kept:
        rows += [(source, row, "MaxWall", _outcome(target)) for source, row in _limit_rows(target)]
    return [
        _Cap(seconds, source, key, outcome)
        for source, row, key, outcome in rows
        if (seconds := time_limit_s(row.get(key))) is not None
    ]


def _limit_rows(target: JobTarget) -> list[tuple[str, Fields]]:
    rows = [(f"QOS {target.qos_name}", target.qos)]
    if target.partition_qos and target.partition_qos != target.qos:
        rows.insert(0, (f"QOS {target.partition_qos['Name']} of partition {target.name}", target.partition_qos))
    return [*rows, (f"account {target.association.get('Account', '')}", target.association)]


def _outcome(target: JobTarget) -> str:
    return (
        REFUSED if any("DenyOnLimit" in row.get("Flags", "") for row in (target.qos, target.partition_qos)) else WAITS
    )


def _broken(source: str, limits: Fields, target: JobTarget, demand: Demand) -> Iterator[DoctorFinding]:
    for column, key in TRES_LIMITS.items():
        for resource, most in tres(limits.get(column)).items():
            kind = resource.partition(":")[0]  # gres/gpu:h100 counts as gres/gpu
            asked, name = {"node": (demand.nodes, "node"), "gres/gpu": (demand.nodes * demand.gpus, "GPU")}.get(
                kind, (0, "")
            )
            if asked > most:
                text = f"{count(asked, name)} exceed the {most} that {source} allows ({key}): {_outcome(target)}"
                yield error("limits", text, "lower job.nodes or job.gpus_per_node, or use another qos or account")


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
