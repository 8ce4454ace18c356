"""Pure: may this job be submitted at all, and would it ever start: partition, account, QOS, time and size."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from launcher.backends.slurm_text import Row, number, time_limit_s, tres
from launcher.doctor.ask import Ask
from launcher.doctor.cluster import Cluster, Target
from launcher.doctor.finding import Finding, count, error, note, ok, span, warning
from launcher.profiles import Profile

SIGNAL_SLACK_S = 60  # Slurm may send --signal this much early, and never late


def no_partition(cluster: Cluster, profile: Profile) -> Finding:
    """Why `target` found none."""
    names = sorted(cluster.partitions)
    known = ", ".join(names) or "none that you may see"
    if profile.partition is None:
        return error(
            "partition",
            f"the profile names none and the cluster has no default; there are: {known}",
            "set partition: in the profile",
        )
    close = difflib.get_close_matches(profile.partition, names, n=1)
    hint = f"did you mean {close[0]}?" if close else "set partition: in the profile to one of these"
    return error("partition", f"there is none called {profile.partition}; there are: {known}", hint)


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


def time_limit(cluster: Cluster, target: Target, profile: Profile, ask: Ask) -> Iterator[Finding]:
    """How long one attempt may run, and whether the time to save at its end suffices."""
    most = time_limit_s(target.partition.get("MaxTime"))
    limit = ask.time_limit_s
    if limit is None:
        limit = time_limit_s(target.partition.get("DefaultTime")) or most
        source = f"the default of partition {target.name}"
    else:
        source = ask.time_limit_key
    if limit is None:
        yield note("time limit", f"none: an attempt of {ask.who} ends only by preemption, failure or mrl cancel")
        return
    if most is not None and limit > most:
        refused = cluster.config.get("EnforcePartLimits", "NO") != "NO"
        outcome = "sbatch refuses it" if refused else "the job would wait for ever (PartitionTimeLimit)"
        yield error(
            "time limit",
            f"{span(limit)} ({source}) is more than partition {target.name} allows, {span(most)} (MaxTime): {outcome}",
            f"set {ask.time_limit_key} to {_slurm_time(most)} or less; the run goes on in the next attempt",
        )
        return
    yield ok("time limit", f"each attempt runs up to {span(limit)} ({source}), then saves and is requeued")
    told = f"{span(profile.signal_s)} before it (signal_s; Slurm may be up to {SIGNAL_SLACK_S} s early)"
    fix = "raise signal_s in the profile above the time of a step and a save"
    if profile.signal_s >= limit:
        yield error("time limit", f"the run is told to save {told}, so no attempt could do any work", fix)
    elif ask.write_s is not None and ask.write_s > profile.signal_s:
        yield warning(
            "time limit",
            f"the run is told to save {told}, but a checkpoint takes about {span(ask.write_s)}: the steps since the "
            "last one would be lost at each limit",
            fix,
        )
    else:
        yield ok("time limit", f"the run is told to save {told}: the step under way and a save must fit in")


def sizes(cluster: Cluster, target: Target, ask: Ask) -> Iterator[Finding]:
    """Limits on nodes, GPUs and time of the partition, the QOS, the partition's QOS and the account."""
    row = target.partition
    most, least = number(row.get("MaxNodes"), 0), number(row.get("MinNodes"), 0)
    if most and ask.nodes > most:
        yield error(
            "size",
            f"{count(ask.nodes, 'node')} are more than partition {target.name} gives one job, {most} (MaxNodes)",
            "lower job.nodes (and job.spare_nodes), or choose another partition",
        )
    if ask.nodes < least:
        yield error(
            "size",
            f"{count(ask.nodes, 'node')} are fewer than partition {target.name} wants, {least} (MinNodes)",
            "choose another partition",
        )
    kept = bool(cluster.enforced & {"limits", "safe", "all"})
    broken = [problem for source, limits in _limit_rows(target) for problem in _broken(source, limits, ask, kept)]
    yield from broken
    jobs = number(target.qos.get("MaxJobsPU"), 0)
    if jobs and kept:
        yield note(
            "limits", f"at most {count(jobs, 'job')} of yours run at a time (MaxJobsPerUser of {target.qos_name})"
        )
    if not broken and cluster.qos is not None:
        whose = f"QOS {target.qos_name}" if target.qos_name else "your account"
        yield ok("limits", f"{ask.needed} are within the limits of {whose}")


def _limit_rows(target: Target) -> list[tuple[str, Row]]:
    rows = [(f"QOS {target.qos_name}", target.qos)]
    if target.partition_qos and target.partition_qos != target.qos:
        rows.insert(0, (f"QOS {target.partition_qos['Name']} of partition {target.name}", target.partition_qos))
    return [*rows, (f"account {target.association.get('Account', '')}", target.association)]


def _broken(source: str, limits: Row, ask: Ask, kept: bool) -> Iterator[Finding]:
    """Limits that the job exceeds all by itself."""
    wanted = {"node": ask.nodes, "gres/gpu": ask.nodes * ask.gpus}
    names = {"node": "node", "gres/gpu": "GPU"}
    at_once = "DenyOnLimit" in limits.get("Flags", "")
    outcome = "sbatch refuses it" if at_once else "it would wait for ever"
    if not kept:
        outcome = "not enforced on this cluster"
    for column in ("GrpTRES", "MaxTRES", "MaxTRESPU", "MaxTRESPA"):
        for resource, most in tres(limits.get(column)).items():
            asked = wanted.get(resource.partition(":")[0], 0)
            if asked <= most:
                continue
            text = (
                f"{count(asked, names[resource.partition(':')[0]])} are more than {source} allows, {most} ({column}): "
                f"{outcome}"
            )
            yield _over(text, kept, "lower job.nodes or job.gpus_per_node, or use another qos or account")
    most_s = time_limit_s(limits.get("MaxWall"))
    if most_s is not None and ask.time_limit_s is not None and ask.time_limit_s > most_s:
        text = f"{span(ask.time_limit_s)} are more than {source} allows, {span(most_s)} (MaxWall): {outcome}"
        yield _over(text, kept, f"set {ask.time_limit_key} to {_slurm_time(most_s)} or less")
    elif most_s is not None and ask.time_limit_s is None and kept:
        yield note("limits", f"{source} ends an attempt after {span(most_s)} (MaxWall); it goes on in the next one")


def _over(text: str, kept: bool, fix: str) -> Finding:
    return error("limits", text, fix) if kept else note("limits", text)


def _admitted(row: Row, key: str, what: str, mine: str | None) -> Iterator[Finding]:
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
