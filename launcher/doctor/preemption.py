"""Loss of the nodes: on preemption, at a time limit, or when a node dies. Pure.

Follows slurm.conf(5) and qos(8), and for what they leave open Slurm's preempt plug-ins of 22.05 and 25.05.

"""

from __future__ import annotations

from launcher.backends.slurm.cluster_facts import number, options
from launcher.doctor.cluster import Cluster, JobTarget
from launcher.doctor.demand import Demand
from launcher.doctor.finding import DoctorFinding, note, ok, span, warning
from launcher.host.slurm.formats import time_limit_s

KILL_WAIT_S = 30
CREDENTIAL_S = 120  # default of cred_expire; a requeued job waits for it
NODE_TIMEOUT_S = 300
TIGHT_S = 60  # a shorter notice counts as short if the time of a save is unknown


def preemption(cluster: Cluster, target: JobTarget, demand: Demand) -> list[DoctorFinding]:
    kind = cluster.config.get("PreemptType", "preempt/none")
    if kind == "preempt/none" or _modes(cluster.config.get("PreemptMode")) <= {"OFF", "GANG"}:
        return [ok("preemption", f"off on this cluster (PreemptType={kind}): {demand.who} keeps its nodes")]
    if kind == "preempt/qos":
        return _by_qos(cluster, target, demand)
    return _by_partition(cluster, target, demand)


def requeue(cluster: Cluster) -> list[DoctorFinding]:
    new = not cluster.before(25, 11)  # releases with requeue_delay
    delay = options(cluster.config.get("SchedulerParameters")).get("requeue_delay") if new else None
    source = "SchedulerParameters=requeue_delay" if delay else "AuthInfo=cred_expire"
    if delay is None:
        delay = options(cluster.config.get("AuthInfo")).get("cred_expire")
    wait = number(delay, CREDENTIAL_S)
    known = source if delay else f"{source} by default"
    found = [ok("requeue", f"a requeued run keeps its job id and waits at least {span(wait + 1)} ({known})")]
    if cluster.config.get("JobRequeue") == "0":
        found.append(ok("requeue", "JobRequeue=0: only jobs submitted with --requeue are requeued; mrl uses it"))
    tries = cluster.config.get("MaxBatchRequeue", "5")  # a setting since 23.02, before that fixed
    found.append(
        ok(
            "requeue",
            f"preemptions do not count; after {tries} failed launches (prolog, node failure) Slurm holds the job "
            "(MaxBatchRequeue) until scontrol release JOB",
        )
    )
    dead = number(cluster.config.get("SlurmdTimeout"), NODE_TIMEOUT_S)
    found.append(
        ok(
            "dead node",
            f"Slurm notices it after about {span(dead)} (SlurmdTimeout) and requeues the run on other nodes",
        )
    )
    return found


def _by_partition(cluster: Cluster, target: JobTarget, demand: Demand) -> list[DoctorFinding]:
    modes = _modes(target.partition.get("PreemptMode") or cluster.config.get("PreemptMode"))
    stronger = _stronger_partitions(cluster, target)
    if modes <= {"OFF", "GANG"}:
        return [ok("preemption", f"jobs of partition {target.name} are never preempted (PreemptMode=OFF)")]
    if not stronger:
        tier = target.partition.get("PriorityTier", "1")
        return [
            ok(
                "preemption",
                f"no partition above tier {tier} shares the nodes of {target.name}, so jobs there are never preempted",
            )
        ]
    grace = number(target.partition.get("GraceTime"))
    by = f"by jobs of partition {' or '.join(stronger)} (by partition: a higher PriorityTier)"
    return _preempted(cluster, target, demand, by, modes, grace, f"GraceTime of partition {target.name}")


def _by_qos(cluster: Cluster, target: JobTarget, demand: Demand) -> list[DoctorFinding]:
    if cluster.qos is None or target.qos_name not in cluster.qos:
        named = f"QOS {target.qos_name}" if target.qos_name else "the QOS of your jobs"
        return [
            warning(
                "preemption",
                f"depends on the QOS on this cluster, and {named} is unknown, so this check cannot say whether and how "
                f"{demand.who} is preempted",
                "run sacctmgr show qos where it works, or set qos: in the profile",
            )
        ]
    own = target.qos.get("PreemptMode", "cluster").lower()
    modes = _modes(cluster.config.get("PreemptMode") if own == "cluster" else own)
    stronger = [name for name, row in cluster.qos.items() if target.qos_name in row.get("Preempt", "").split(",")]
    if "WITHIN" in modes | _modes(cluster.config.get("PreemptMode")):
        stronger.append(f"{target.qos_name} itself")
    if modes <= {"OFF", "GANG"}:
        return [ok("preemption", f"jobs of QOS {target.qos_name} are never preempted (PreemptMode=OFF)")]
    if not stronger:
        return [ok("preemption", f"no QOS may preempt {target.qos_name} (none lists it in Preempt)")]
    grace = time_limit_s(target.qos.get("GraceTime")) or 0
    by = f"by jobs of QOS {' or '.join(stronger)} (by QOS: it lists {target.qos_name} in Preempt)"
    return _preempted(cluster, target, demand, by, modes, grace, f"GraceTime of QOS {target.qos_name}")


def _preempted(
    cluster: Cluster, target: JobTarget, demand: Demand, by: str, modes: set[str], grace_s: int, source: str
) -> list[DoctorFinding]:
    kill_s = number(cluster.config.get("KillWait"), KILL_WAIT_S)  # from SIGTERM to SIGKILL
    found = [_ending(demand, by, modes)]
    if "SUSPEND" in modes:
        return found
    found.append(_notice(demand, grace_s, kill_s, source))
    if grace_s:
        found.append(_signals(cluster, grace_s))
    exempt = next(
        (
            limit
            for row in (target.partition_qos, target.qos, cluster.config)
            if (limit := time_limit_s(row.get("PreemptExemptTime"))) is not None
        ),
        0,
    )
    if exempt:
        found.append(ok("preemption", f"not in the first {span(exempt)} of an attempt (PreemptExemptTime)"))
    return found


def _ending(demand: Demand, by: str, modes: set[str]) -> DoctorFinding:
    if "REQUEUE" in modes:
        return ok("preemption", f"{demand.who} can be preempted {by}; it is requeued and resumes (PreemptMode=REQUEUE)")
    if "SUSPEND" in modes:
        text = (
            f"{demand.who} can be preempted {by} and is then suspended (PreemptMode=SUSPEND): it gets no "
            "notice, keeps its GPU memory, and its ranks may run into job.collective_timeout_s when they continue"
        )
        return warning("preemption", text, "use a partition or QOS whose PreemptMode is REQUEUE")
    return note(
        "preemption",
        f"{demand.who} can be preempted {by}; Slurm then ends the job and does not requeue it (PreemptMode=CANCEL); "
        "the run requeues itself if it has saved in time, and ends otherwise",
        "resume it with mrl resume RUN, or use a partition or QOS whose PreemptMode is REQUEUE",
    )


def _notice(demand: Demand, grace_s: int, kill_s: int, source: str) -> DoctorFinding:
    """Compare the time from the first signal to SIGKILL with the time of a save."""
    total = grace_s + kill_s
    notice = f"notice of {span(grace_s)} ({source}), then SIGTERM and {span(kill_s)} later SIGKILL (KillWait)"
    if grace_s == 0:
        notice = f"no grace ({source} is 0): SIGTERM at once and SIGKILL {span(kill_s)} later (KillWait)"
    if demand.save_every is None:
        return ok("notice", notice)
    fix = "ask for a longer GraceTime"
    if demand.save_every != "auto":
        fix += f", or lower save.every ({demand.save_every}) so that less is lost"
    if demand.write_s is not None and demand.write_s > total:
        text = f"{notice}; a checkpoint takes about {span(demand.write_s)}, so a preemption loses {demand.loss}"
        return warning("notice", text, fix)
    if demand.write_s is None and total < TIGHT_S:
        return warning("notice", f"{notice}; a save that takes longer is lost, and with it {demand.loss}", fix)
    takes = "a save" if demand.write_s is None else f"a checkpoint, about {span(demand.write_s)},"
    return ok("notice", f"{notice}; {takes} must fit in, or {demand.loss} are lost")


def _signals(cluster: Cluster, grace_s: int) -> DoctorFinding:
    new = options(cluster.config.get("PreemptParameters"))
    old = options(cluster.config.get("SlurmctldParameters"))
    if "send_user_signal" in new or "preempt_send_user_signal" in old:
        return ok(
            "signal", "the batch script gets the signal at once (USR1: send_user_signal is on) and makes the ranks save"
        )
    return ok(
        "signal",
        "only the ranks get the signal at once (SIGTERM: send_user_signal is off), the batch script after "
        f"{span(grace_s)}; the ranks save without waiting for it",
    )


def _stronger_partitions(cluster: Cluster, target: JobTarget) -> list[str]:
    mine = {node.name for node in cluster.nodes.get(target.name, [])}
    tier = number(target.partition.get("PriorityTier"), 1)
    return [
        name
        for name, row in cluster.partitions.items()
        if number(row.get("PriorityTier"), 1) > tier and mine & {node.name for node in cluster.nodes.get(name, [])}
    ]


def _modes(text: str | None) -> set[str]:
    return {part.strip().upper() for part in (text or "OFF").split(",")}
