"""All checks, in the order to read their findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.disk import Disk
from launcher.backends.probe.node import NodeFacts
from launcher.backends.probe.rank import RankFacts
from launcher.backends.probe.vllm_probe import VllmFacts
from launcher.backends.slurm.cluster_facts import SlurmFacts
from launcher.cluster.profile import Profile
from launcher.doctor import limits, node_findings, preemption, preflight, software_findings, storage
from launcher.doctor.cluster import Cluster, partition_names, read_cluster, target
from launcher.doctor.demand import Demand, demand_of
from launcher.doctor.finding import DoctorFinding, error, ok, warning
from launcher.doctor.gpu_findings import shared_gpus
from launcher.doctor.preflight import LocalFacts
from launcher.doctor.vllm_python import quantised_findings, vllm_findings, vllm_later
from megatron_rl.recipe.config import RunConfig


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    slurm: SlurmFacts
    host_python: CommandAnswer
    run_root: Disk
    node: NodeFacts | None
    rank: RankFacts | None
    """Result of a rank in the container; None: without --deep."""
    missing_secrets: tuple[str, ...]
    fetched: tuple[DoctorFinding, ...]
    checkpoint_bytes: int | None
    """Size of one checkpoint; None: no recipe, or only the tokenizer knows the vocabulary."""
    refusals: tuple[str, ...]
    vllm: VllmFacts | None = None
    """vLLM in the container of the inference replicas; None: without --deep, or the run starts none."""
    preflight: tuple[DoctorFinding, ...] = ()


def examine(facts: ClusterFacts, config: RunConfig | None, profile: Profile) -> list[DoctorFinding]:
    """Return all findings, the most general first. Without a recipe they are about a run of one node."""
    demand = demand_of(config, profile, facts.checkpoint_bytes, _speed(facts.run_root))
    cluster = read_cluster(facts.slurm)
    found = [error("recipe", refusal, "change the recipe or override the value") for refusal in facts.refusals]
    found += software_findings.controller(facts.slurm, cluster)
    for said in cluster.unclear:
        text = f"{said} is not a valid Slurm time; checks that need it were skipped"
        found.append(warning("slurm", text, "see it with scontrol show partition, or sacctmgr show qos"))
    if facts.slurm.config.known:
        found += _placed(cluster, profile, demand)
        found.append(software_findings.accounting(facts.slurm, cluster))
        found += software_findings.containers(facts.slurm, demand)
    if facts.node is not None:
        found += software_findings.compute_node(facts.node, profile, demand)
        found += shared_gpus(facts.node.compute_mode, config) if config is not None else ()
    if facts.rank is not None and profile.container is not None:
        found.append(software_findings.first_rank(facts.rank, demand))
        found += software_findings.kernels(facts.rank, config)
    if config is not None:
        found += quantised_findings(config)
    if config is not None and profile.container is not None and config.started_vllms:
        vllm = next(iter(config.started_vllms.values()))
        found += vllm_findings(facts.vllm, config.job.device, vllm) if facts.vllm else [vllm_later(config, profile)]
    found += software_findings.host_python(facts.host_python, facts.node, profile)
    found += storage.run_root(facts.run_root, demand)
    found += storage.shared(facts.run_root, facts.node, demand)
    found += facts.preflight
    found += _secrets_and_files(facts, profile)
    return list(dict.fromkeys(found))  # several partitions share findings


def examine_local(
    facts: LocalFacts, run_root: Disk, checkpoint_bytes: int | None, config: RunConfig | None
) -> list[DoctorFinding]:
    profile = Profile(gpus_per_node=max(facts.machine.gpus, 1), run_root=str(run_root.path))
    return [
        ok("local", "runs on this machine without Slurm; it is never preempted, and Ctrl-C saves and ends it"),
        *preflight.findings(facts, config),
        *storage.run_root(run_root, demand_of(config, profile, checkpoint_bytes, _speed(run_root))),
    ]


def _speed(run_root: Disk) -> float | None:
    return run_root.measured.bytes_per_s if run_root.measured else None


def _placed(cluster: Cluster, profile: Profile, demand: Demand) -> Iterator[DoctorFinding]:
    names = partition_names(cluster, profile)
    if not names:
        yield limits.no_partition(cluster, None)
    for name in names:
        if name not in cluster.partitions:
            yield limits.no_partition(cluster, name)
            continue
        chosen = target(cluster, profile, name)
        yield limits.state(chosen, profile)
        yield from node_findings.nodes(cluster, chosen, profile, demand)
        yield from limits.sizes(cluster, chosen, demand)
        yield from limits.time_limit(cluster, chosen, profile, demand)
        yield from preemption.preemption(cluster, chosen, demand)
        yield from preemption.requeue(cluster)


def _secrets_and_files(facts: ClusterFacts, profile: Profile) -> Iterator[DoctorFinding]:
    if facts.missing_secrets:
        names = ", ".join(facts.missing_secrets)
        yield warning(
            "secrets", f"not set in this shell, so the job will not have them: {names}", "export them before mrl-submit"
        )
    elif profile.secrets:
        yield ok("secrets", f"set: {', '.join(profile.secrets)}")
    yield from facts.fetched
