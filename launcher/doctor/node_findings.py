"""Nodes and GPUs of the partition, compared with the demand. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from launcher.cluster.profile import Profile
from launcher.doctor.cluster import Cluster, JobTarget, Node
from launcher.doctor.demand import Demand
from launcher.doctor.finding import DoctorFinding, count, error, note, ok, warning


def nodes(cluster: Cluster, target: JobTarget, profile: Profile, demand: Demand) -> Iterator[DoctorFinding]:
    there = cluster.nodes.get(target.name, [])
    if not there:
        yield warning("nodes", f"sinfo lists none in partition {target.name}", "check with sinfo -a")
        return
    featured = _with_features(there, profile.constraint)
    if not featured:
        known = ", ".join(sorted(set().union(*(node.features for node in there)))) or "none"
        text = f"no node of {target.name} has the features {profile.constraint}; its features: {known}"
        yield error("constraint", text, "correct constraint: in the profile")
        return
    if profile.gres is None:  # the job requests none from Slurm
        demand = replace(demand, gpus=0)
    if demand.gpus:
        yield from _gpus(target, profile, demand, featured)
    fitting = [node for node in featured if not demand.gpus or node.gpus(profile.gpu_type) >= demand.gpus]
    if fitting:
        yield from _enough(target, demand, fitting)
        yield from _cpus(profile, demand, fitting)


def _gpus(target: JobTarget, profile: Profile, demand: Demand, there: list[Node]) -> Iterator[DoctorFinding]:
    kinds = Counter((one.type or "gpu", one.count) for node in there for one in node.gres if one.name == "gpu")
    known = ", ".join(f"{number} x {kind}:{each}" for (kind, each), number in sorted(kinds.items())) or "none"
    if not kinds:
        yield error(
            "gpus",
            f"the nodes of {target.name} have no GPUs known to Slurm, and {demand.who} asks for {demand.gpus} per node",
            "choose another partition, or job.device=cpu",
        )
    elif not any(node.gpus(profile.gpu_type) for node in there):
        types = ", ".join(sorted({kind for kind, _ in kinds if kind != "gpu"})) or "only gpu"
        text = f"{target.name} has no GPU type {profile.gpu_type}; its types: {types}"
        yield error("gpus", text, "correct gres: in the profile")
    elif max(node.gpus(profile.gpu_type) for node in there) < demand.gpus:
        text = f"{demand.who} asks for {demand.gpus} GPUs per node, and the nodes of {target.name} have: {known}"
        yield error("gpus", text, "lower job.gpus_per_node")
    else:
        most = max(node.gpus(profile.gpu_type) for node in there)
        text = f"{target.name} has {known}; each node of {demand.who} gets {demand.gpus} ({_flag(profile, demand)})"
        yield ok("gpus", text)
        if most != profile.gpus_per_node:
            text = f"the profile says {count(profile.gpus_per_node, 'GPU')} per node, Slurm says {most}"
            yield note("gpus", text, "correct gpus_per_node: in the profile")


def _flag(profile: Profile, demand: Demand) -> str:
    return " ".join(f"--{name}={value}" for name, value in profile.gpus(demand.gpus).items())


def _enough(target: JobTarget, demand: Demand, fitting: list[Node]) -> Iterator[DoctorFinding]:
    working = [node for node in fitting if node.in_service]
    idle = sum(node.state == "idle" for node in working)
    what = f"{demand.needed} needed, {target.name} has {count(len(fitting), 'such node')}"
    if len(fitting) < demand.nodes:
        yield error("nodes", f"{what}, so the job can never start", "lower job.nodes, or choose another partition")
    elif len(working) < demand.nodes:
        out = Counter(node.state for node in fitting if not node.in_service)
        states = ", ".join(f"{number} {state}" for state, number in sorted(out.items()))
        text = f"{what}, but only {len(working)} in service ({states}): the job waits for the others"
        yield warning("nodes", text, "lower job.nodes, or ask when they return (sinfo -R gives the reasons)")
    else:
        yield ok("nodes", f"{what}, {len(working)} in service and {idle} idle now")


def _cpus(profile: Profile, demand: Demand, fitting: list[Node]) -> Iterator[DoctorFinding]:
    most = max(node.cpus for node in fitting)
    wanted = demand.ranks * (profile.cpus_per_task or 1)
    if most and wanted > most:
        each = f"{demand.ranks} ranks of {count(profile.cpus_per_task or 1, 'CPU')}"
        text = f"{each} need {wanted} CPUs per node, and the nodes have {most}"
        yield error("cpus", text, "lower cpus_per_task: in the profile, or job.gpus_per_node")


def _with_features(there: list[Node], constraint: str | None) -> list[Node]:
    """Nodes that could satisfy the constraint. Only names joined by `&` are checked; any other constraint passes."""
    if constraint is None or not re.fullmatch(r"[\w.&-]+", constraint):
        return there
    return [node for node in there if node.features >= set(constraint.split("&"))]
