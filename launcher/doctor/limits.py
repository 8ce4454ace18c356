"""Pure: may this job be submitted at all, and would it ever start: partition, account, QOS, time and size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.backends.slurm import refusal
from launcher.backends.slurm.parse import Fields, number, tres
from launcher.cluster.profile import Profile
from launcher.doctor.cluster import Cluster, Target
from launcher.doctor.demand import Demand
from launcher.doctor.finding import Finding, count, error, note, ok, span, warning
from launcher.host.slurm.formats import time_limit_s

SIGNAL_SLACK_S = 60  # Slurm may send --signal this much early, and never late
REFUSED = "sbatch refuses it"
WAITS = "the job would wait for ever"
TRES_LIMITS = {
    "GrpTRES": "GrpTRES",
    "MaxTRES": "MaxTRESPerJob",
    "MaxTRESPU": "MaxTRESPerUser",
    "MaxTRESPA": "MaxTRESPerAccount",
}
"""Column of sacctmgr -> the limit's own name."""


def no_partition(cluster: Cluster, name: str | None) -> Finding:
    """What is wrong with the name, or with there being none."""
    if name is None:
        known = ", ".join(sorted(cluster.partitions)) or "none that you may see"
        return error(
            "partition",
            f"the profile names none and the cluster has no default; there are: {known}",
            "set partition: in the profile",
        )
    text, hint = refusal.no_partition(name, cluster.partitions)
    return error("partition", text, hint or "set partition: in the profile to one of these")


def access(cluster: Cluster, target: Target, profile: Profile) -> Iterator[Finding]:
    """The partition's state, who may use it, and whether account, QOS and reservation exist."""
    row, name = target.partition, target.name
    state = row.get("State", "UP")
    if state in ("DRAIN", "INACTIVE"):
        yield error("partition", f"{name} takes no new jobs (State={state})", "wait, or choose another partition")
    elif state == "DOWN":
        yield warning("partition", f"{name} starts no jobs for now (State=DOWN): yours would wait", "ask why, or wait")
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
        text = f"account {profile.account} is not among yours"
        known = ", ".join(sorted({one["Account"] for one in cluster.associations if "Account" in one})) or "none"
        if enforced:
            yield error("account", f"{text}: sbatch refuses it; yours: {known}", "correct account: in the profile")
        else:
            yield note("account", f"{text} ({known}); this cluster does not check")


def time_limit(cluster: Cluster, target: Target, profile: Profile, demand: Demand) -> Iterator[Finding]:
    """How long one attempt may run, and whether the time to save at its end suffices."""
    caps = _time_caps(cluster, target)
    limit, source = demand.time_limit_s, demand.time_limit_key
    if limit is None:
        limit = time_limit_s(target.partition.get("DefaultTime")) or min((cap.seconds for cap in caps), default=None)
        source = "the default there"
    if limit is None:
        yield note("time limit", f"none: an attempt of {demand.who} ends only by preemption, failure or mrl cancel")
        return
    over = [cap for cap in caps if cap.seconds < limit]
    for cap in over:
        yield error(
            "time limit",
            f"{span(limit)} ({source}) is over the {span(cap.seconds)} of {cap.source} ({cap.key}): {cap.outcome}",
            f"set {demand.time_limit_key} to {_slurm_time(cap.seconds)} or less; the run goes on in the next attempt",
        )
    if not over:
        yield ok("time limit", f"each attempt runs up to {span(limit)} ({source}), then saves and is requeued")
        yield _end_notice(profile, demand, limit)


def _end_notice(profile: Profile, demand: Demand, limit_s: int) -> Finding:
    told = f"{span(profile.signal_s)} before it (signal_s; Slurm may be up to {SIGNAL_SLACK_S} s early)"
    fix = "raise signal_s in the profile above the time of a step and a save"
    if profile.signal_s >= limit_s:
        return error("time limit", f"the run is told to save {told}, so no attempt could do any work", fix)
    if demand.write_s is not None and demand.write_s > profile.signal_s:
        return warning(
            "time limit",
            f"the run is told to save {told}, but a checkpoint takes about {span(demand.write_s)}: each limit loses "
            f"{demand.loss}",
            fix,
        )
    return ok("time limit", f"the run is told to save {told}: the step under way and a save must fit in")


def sizes(cluster: Cluster, target: Target, demand: Demand) -> Iterator[Finding]:
    """Limits on nodes and GPUs of the partition, the QOS, the partition's QOS and the account."""
    row = target.partition
    most, least = number(row.get("MaxNodes"), 0), number(row.get("MinNodes"), 0)
    if most and demand.nodes > most:
        yield error(
            "size",
            f"{count(demand.nodes, 'node')} are more than partition {target.name} gives one job, {most} (MaxNodes)",
            "lower job.nodes (and job.spare_nodes), or choose another partition",
        )
    if demand.nodes < least:
        yield error(
            "size",
            f"{count(demand.nodes, 'node')} are fewer than partition {target.name} wants, {least} (MinNodes)",
            "choose another partition",
        )
    if cluster.qos is None:
        return
    if not cluster.limits_kept:
        yield ok("limits", "this cluster keeps none of accounts and QOS (AccountingStorageEnforce)")
        return
    broken = [problem for source, limits in _limit_rows(target) for problem in _broken(source, limits, target, demand)]
    yield from broken
    jobs = number(target.qos.get("MaxJobsPU"), 0)
    if jobs:
        whose = f"MaxJobsPerUser of QOS {target.qos_name}"
        yield note("limits", f"at most {count(jobs, 'job')} of yours run at a time ({whose}): sweeps take turns")
    if not broken:
        yield ok(
            "limits", f"what is asked for ({demand.needed}) is within those of your account and QOS {target.qos_name}"
        )


@dataclass(frozen=True, slots=True)
class _Cap:
    """A limit on time."""

    seconds: int
    source: str
    key: str
    outcome: str
    """What becomes of a job that asks for more."""


def _time_caps(cluster: Cluster, target: Target) -> list[_Cap]:
    refused = cluster.config.get("EnforcePartLimits", "NO") != "NO"
    rows = [(f"partition {target.name}", target.partition, "MaxTime", REFUSED if refused else WAITS)]
    if cluster.limits_kept:
        rows += [(source, row, "MaxWall", _outcome(target)) for source, row in _limit_rows(target)]
    return [
        _Cap(seconds, source, key, outcome)
        for source, row, key, outcome in rows
        if (seconds := time_limit_s(row.get(key))) is not None
    ]


def _limit_rows(target: Target) -> list[tuple[str, Fields]]:
    rows = [(f"QOS {target.qos_name}", target.qos)]
    if target.partition_qos and target.partition_qos != target.qos:
        rows.insert(0, (f"QOS {target.partition_qos['Name']} of partition {target.name}", target.partition_qos))
    return [*rows, (f"account {target.association.get('Account', '')}", target.association)]


def _outcome(target: Target) -> str:
    """What becomes of a job above a limit: the QOS decides, for the account's limits too."""
    return (
        REFUSED if any("DenyOnLimit" in row.get("Flags", "") for row in (target.qos, target.partition_qos)) else WAITS
    )


def _broken(source: str, limits: Fields, target: Target, demand: Demand) -> Iterator[Finding]:
    """Limits that the job exceeds all by itself."""
    for column, key in TRES_LIMITS.items():
        for resource, most in tres(limits.get(column)).items():
            kind = resource.partition(":")[0]  # gres/gpu:h100 counts as gres/gpu
            asked, name = {"node": (demand.nodes, "node"), "gres/gpu": (demand.nodes * demand.gpus, "GPU")}.get(
                kind, (0, "")
            )
            if asked > most:
                yield error(
                    "limits",
                    f"{count(asked, name)} are more than {source} allows, {most} ({key}): {_outcome(target)}",
                    "lower job.nodes or job.gpus_per_node, or use another qos or account",
                )


def _admitted(row: Fields, key: str, what: str, mine: str | None) -> Iterator[Finding]:
    """Allow... and Deny... lists of a partition."""
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


def _qos_exists(cluster: Cluster, target: Target, profile: Profile) -> Iterator[Finding]:
    if cluster.qos is None:
        if profile.qos:
            yield note("qos", f"whether there is a QOS {profile.qos} cannot be told: sacctmgr does not answer")
        return
    if profile.qos and profile.qos not in cluster.qos:
        known = ", ".join(sorted(cluster.qos))
        yield error("qos", f"there is none called {profile.qos}; there are: {known}", "correct qos: in the profile")
        return
    mine = [name for name in target.association.get("QOS", "").split(",") if name]
    if profile.qos and mine and profile.qos not in mine:
        text = f"{profile.qos} is not among yours ({', '.join(mine)})"
        if cluster.enforced & {"qos", "all"}:
            yield error("qos", f"{text}: sbatch refuses it", "correct qos: in the profile, or ask for it")
        else:
            yield note("qos", f"{text}; this cluster does not check")


def _slurm_time(seconds: int) -> str:
    days, rest = divmod(seconds, 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
