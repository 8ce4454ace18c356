"""Slurm's answers, parsed, and the partition, QOS and association that a job of a profile gets. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.backends.slurm.cluster_facts import (
    Fields,
    Gres,
    SlurmFacts,
    gres,
    oneliners,
    options,
    settings,
    table,
    version,
)
from launcher.cluster.profile import Profile
from launcher.host.slurm.formats import time_limit_s
from megatron_rl.contract.text import whole_number

OUT_OF_SERVICE = ("down", "drain", "draining", "drained", "fail", "failing", "maint", "unknown", "future", "error")


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    state: str
    """State in Slurm's words, without the marks for power saving and not responding."""
    gres: list[Gres]
    cpus: int
    features: frozenset[str]

    @property
    def in_service(self) -> bool:
        return self.state not in OUT_OF_SERVICE

    def gpus(self, kind: str = "gpu") -> int:
        return sum(one.count for one in self.gres if one.name == "gpu" and kind in ("gpu", one.type))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Configuration and objects of Slurm. Keys are Slurm's own; unset and unlimited values are absent."""

    client: tuple[int, int, int] | None
    config: Fields
    partitions: Mapping[str, Fields]
    nodes: Mapping[str, list[Node]]
    qos: Mapping[str, Fields] | None
    """QOS by name; None: the accounting database is missing or did not answer."""
    associations: list[Fields]
    enforced: frozenset[str] = field(default_factory=frozenset)
    """Options of AccountingStorageEnforce: the recorded limits that Slurm enforces."""
    unclear: tuple[str, ...] = ()
    """Values that are not valid Slurm times and were left out: `partition gold: MaxTime=soon`."""

    @property
    def version(self) -> tuple[int, int, int] | None:
        return version(self.config.get("SLURM_VERSION", "")) or self.client

    @property
    def limits_kept(self) -> bool:
        return bool(self.enforced & {"limits", "safe", "all"})

    def before(self, *release: int) -> bool:
        """Whether this Slurm is older than a release, such as (23, 2). An unknown version counts as new."""
        return self.version is not None and self.version < release


@dataclass(frozen=True, slots=True)
class JobTarget:
    partition: Fields
    qos_name: str | None
    qos: Fields
    partition_qos: Fields
    """QOS of the partition; its limits take precedence over those of `qos`."""
    association: Fields

    @property
    def name(self) -> str:
        return self.partition["PartitionName"]


def read_cluster(facts: SlurmFacts) -> Cluster:
    config = settings(facts.config.text)
    unclear: list[str] = []

    def understood(rows: Iterable[Fields], name: str, what: str, times: Sequence[str]) -> list[Fields]:
        return [_with_times(row, f"{what} {row[name]}", times, unclear) for row in rows if name in row]

    partitions = understood(oneliners(facts.partitions.text), "PartitionName", "partition", ("DefaultTime", "MaxTime"))
    qos = understood(table(facts.qos.text), "Name", "QOS", ("MaxWall", "GraceTime", "PreemptExemptTime"))
    associations = understood(table(facts.associations.text), "Cluster", "an association on", ("MaxWall",))
    return Cluster(
        client=version(facts.version.text),
        config=config,
        partitions={row["PartitionName"]: row for row in partitions},
        nodes=_nodes(facts.nodes.text),
        qos={row["Name"]: row for row in qos} if facts.qos.known else None,
        associations=[row for row in associations if row["Cluster"] == config.get("ClusterName")]
        if facts.associations.known
        else [],
        enforced=frozenset(options(config.get("AccountingStorageEnforce", "").lower())),
        unclear=tuple(unclear),
    )


def _with_times(row: Fields, what: str, times: Sequence[str], unclear: list[str]) -> Fields:
    kept = dict(row)
    for key in times:
        try:
            time_limit_s(row.get(key))
        except ValueError:
            unclear.append(f"{what}: {key}={kept.pop(key)}")
    return kept


def partition_names(cluster: Cluster, profile: Profile) -> list[str]:
    if profile.partition:
        return profile.partition.split(",")
    return [name for name, row in cluster.partitions.items() if row.get("Default") == "YES"]


def target(cluster: Cluster, profile: Profile, name: str) -> JobTarget:
    partition = cluster.partitions[name]
    association = _association(cluster, profile.account, name)
    known = cluster.qos or {}
    qos_name = profile.qos or association.get("Def QOS") or association.get("QOS", "").split(",")[0] or None
    if qos_name is None and "normal" in known:
        qos_name = "normal"
    return JobTarget(
        partition=partition,
        qos_name=qos_name,
        qos=known.get(qos_name or "", {}),
        partition_qos=known.get(partition.get("QoS", ""), {}),
        association=association,
    )


def _association(cluster: Cluster, account: str | None, partition: str) -> Fields:
    rows = [row for row in cluster.associations if account is None or row.get("Account") == account]
    fitting = [row for row in rows if row.get("Partition") in (None, partition)]
    return max(fitting, key=lambda row: row.get("Partition") == partition, default={})


def _nodes(text: str) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 6:
            continue
        name, partition, state, resources, cpus, features = fields
        node = Node(
            name=name,
            state=re.sub(r"[^a-z_]", "", state.lower()),
            gres=gres(resources),
            cpus=whole_number(cpus) or 0,
            features=frozenset(features.split(",")) - {"(null)"},
        )
        found.setdefault(partition, []).append(node)
    return found
