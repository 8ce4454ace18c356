"""Whether Slurm accepts the job and can start it: partition, account, QOS, time and size. Pure."""

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


def access(cluster: Cluster, target: JobTarget, profile: Profile) -> Iterator[DoctorFinding]:
    row, name = target.partition, target.name
    state = row.get("State", "UP")
    if state in ("DRAIN", "INACTIVE"):
        yield error("partition", f"{name} accepts no new jobs (State={state})", "wait, or choose another partition")
    elif state == "DOWN":
        text = f"{name} starts no jobs at the moment (State=DOWN), so this one would wait"
        yield warning("partition", text, "ask the administrators, or wait")
    else:
        yield ok("partition", f"{name}{'' if profile.partition else ', the default of the cluster'}")
    account = profile.account or target.association.get("Account")
    yield from _admitted(row, "Accounts", "account", account)
    yield from _admitted(row, "Qos", "qos", target.qos_name)
    if profile.reservation and profile.reservation not in cluster.reservations:
        known = ", ".join(sorted(cluster.reservations)) or "none"
        yield error(
            "reservation", f"there is none called {profile.reservation}; there are: {known}", "correct the profile"
        )
    yield from _qos_exists(cluster, target, profile)
    enforced = cluster.enforced & {"associations", "limits", "qos", "safe", "all"}
    if profile.account and cluster.qos is not None and not target.association:
        text = f"you do not belong to account {profile.account}"
        known = ", ".join(sorted({one["Account"] for one in cluster.associations if "Account" in one})) or "none"
        if enforced:
            yield error(
                "account",
                f"{text}, so sbatch refuses the job; your accounts: {known}",
                "correct account: in the profile",
            )
        else:
            yield note("account", f"{text} (yours: {known}), but this cluster does not check it")


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
    """Fate of a job that asks for more."""


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
    """Fate of a job above a limit. The QOS decides, for the limits of the account too."""
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


def _admitted(row: Fields, key: str, what: str, mine: str | None) -> Iterator[DoctorFinding]:
    name = row["PartitionName"]
    allowed, denied = row.get(f"Allow{key}", "ALL"), row.get(f"Deny{key}", "")
    if mine is None:
        if allowed != "ALL":
            yield note(
                what, f"partition {name} is for {what} {allowed} only", f"set {what}: in the profile if sbatch asks"
            )
    elif (allowed != "ALL" and mine not in allowed.split(",")) or mine in denied.split(","):
        whom = f"is for {allowed} only" if allowed != "ALL" else f"refuses {denied}"
        yield error(
            what, f"partition {name} {whom}, yours is {mine}", f"set {what}: in the profile, or another partition"
        )


def _qos_exists(cluster: Cluster, target: JobTarget, profile: Profile) -> Iterator[DoctorFinding]:
    if cluster.qos is None:
        if profile.qos:
            yield note("qos", f"QOS {profile.qos} cannot be checked: sacctmgr does not answer")
        return
    if profile.qos and profile.qos not in cluster.qos:
        known = ", ".join(sorted(cluster.qos))
        yield error("qos", f"there is none called {profile.qos}; there are: {known}", "correct qos: in the profile")
        return
    mine = [name for name in target.association.get("QOS", "").split(",") if name]
    if profile.qos and mine and profile.qos not in mine:
        text = f"{profile.qos} is not one of your QOS ({', '.join(mine)})"
        if cluster.enforced & {"qos", "all"}:
            yield error(
                "qos", f"{text}, so sbatch refuses the job", "correct qos: in the profile, or request access to it"
            )
        else:
            yield note("qos", f"{text}, but this cluster does not check it")


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
