"""Pure: Slurm's texts, understood; and the partition, QOS and association that a job of this profile would get."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.backends.slurm.facts import SlurmFacts
from launcher.backends.slurm.parse import Fields, Gres, gres, oneliners, options, settings, table, version
from launcher.cluster.profile import Profile
from launcher.host.slurm.formats import time_limit_s

OUT_OF_SERVICE = ("down", "drain", "draining", "drained", "fail", "failing", "maint", "unknown", "future", "error")


@dataclass(frozen=True, slots=True)
class Node:
    """One node of one partition."""

    name: str
    state: str
    """Slurm's word, without the marks for power saving and silence."""
    gres: list[Gres]
    cpus: int
    features: frozenset[str]

    @property
    def in_service(self) -> bool:
        """Whether jobs can run there, now or when it is free."""
        return self.state not in OUT_OF_SERVICE

    def gpus(self, kind: str = "gpu") -> int:
        """How many GPUs of this type; `gpu` counts every type."""
        return sum(one.count for one in self.gres if one.name == "gpu" and kind in ("gpu", one.type))


@dataclass(frozen=True, slots=True)
class Cluster:
    """What Slurm says of itself. Keys are Slurm's own; what is unset or unlimited is absent."""

    client: tuple[int, int, int] | None
    config: Fields
    partitions: Mapping[str, Fields]
    nodes: Mapping[str, list[Node]]
    """By partition."""
    qos: Mapping[str, Fields] | None
    """None: there is no accounting database, or it did not answer."""
    associations: list[Fields]
    reservations: Mapping[str, Fields]
    enforced: frozenset[str] = field(default_factory=frozenset)
    """AccountingStorageEnforce: which of the recorded limits are kept."""
    unclear: tuple[str, ...] = ()
    """What was left out because it is no time of Slurm's: `partition gold: MaxTime=soon`."""

    @property
    def version(self) -> tuple[int, int, int] | None:
        """The controller's, else that of the commands here."""
        return version(self.config.get("SLURM_VERSION", "")) or self.client

    @property
    def limits_kept(self) -> bool:
        """Whether the limits of QOS and associations count."""
        return bool(self.enforced & {"limits", "safe", "all"})

    def before(self, *release: int) -> bool:
        """Whether this Slurm is older than, say, 23.2; an unknown one is taken for new."""
        return self.version is not None and self.version < release


@dataclass(frozen=True, slots=True)
class Target:
    """Where a job of the profile lands."""

    partition: Fields
    qos_name: str | None
    qos: Fields
    partition_qos: Fields
    """Its limits go before those of `qos`."""
    association: Fields

    @property
    def name(self) -> str:
        """Name of the partition."""
        return self.partition["PartitionName"]


def read_cluster(facts: SlurmFacts) -> Cluster:
    """Understand what was collected; texts that are missing leave empty places."""
    config = settings(facts.config.text)
    unclear: list[str] = []

    def understood(rows: Iterable[Fields], name: str, what: str, times: Sequence[str]) -> list[Fields]:
        return [_with_times(row, f"{what} {row[name]}", times, unclear) for row in rows if name in row]

    partitions = understood(oneliners(facts.partitions.text), "PartitionName", "partition", ("DefaultTime", "MaxTime"))
    qos = understood(table(facts.qos.text), "Name", "QOS", ("MaxWall", "GraceTime", "PreemptExemptTime"))
    associations = understood(table(facts.associations.text), "Cluster", "an association on", ("MaxWall",))
    reservations = [row for row in oneliners(facts.reservations.text) if "ReservationName" in row]
    return Cluster(
        client=version(facts.version.text),
        config=config,
        partitions={row["PartitionName"]: row for row in partitions},
        nodes=_nodes(facts.nodes.text),
        qos={row["Name"]: row for row in qos} if facts.qos.known else None,
        associations=[row for row in associations if row["Cluster"] == config.get("ClusterName")]
        if facts.associations.known
        else [],
        reservations={row["ReservationName"]: row for row in reservations},
        enforced=frozenset(options(config.get("AccountingStorageEnforce", "").lower())),
        unclear=tuple(unclear),
    )


def _with_times(row: Fields, what: str, times: Sequence[str], unclear: list[str]) -> Fields:
    """A row without those of its times that are none, which are added to `unclear`."""
    kept = dict(row)
    for key in times:
        try:
            time_limit_s(row.get(key))
        except ValueError:
            unclear.append(f"{what}: {key}={kept.pop(key)}")
    return kept


def partition_names(cluster: Cluster, profile: Profile) -> list[str]:
    """Where the job may go: Slurm takes several, and starts it in the first that has room."""
    if profile.partition:
        return profile.partition.split(",")
    return [name for name, row in cluster.partitions.items() if row.get("Default") == "YES"]


def target(cluster: Cluster, profile: Profile, name: str) -> Target:
    """What the profile's words select in a partition that is there."""
    partition = cluster.partitions[name]
    association = _association(cluster, profile.account, name)
    known = cluster.qos or {}
    qos_name = profile.qos or association.get("Def QOS") or association.get("QOS", "").split(",")[0] or None
    if qos_name is None and "normal" in known:
        qos_name = "normal"
    return Target(
        partition=partition,
        qos_name=qos_name,
        qos=known.get(qos_name or "", {}),
        partition_qos=known.get(partition.get("QoS", ""), {}),
        association=association,
    )


def _association(cluster: Cluster, account: str | None, partition: str) -> Fields:
    """The row of this user for the account, one for the partition first."""
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
            cpus=int(cpus) if cpus.isdecimal() else 0,
            features=frozenset(features.split(",")) - {"(null)"},
        )
        found.setdefault(partition, []).append(node)
    return found
