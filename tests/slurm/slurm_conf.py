"""The text of the lab's configuration files. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Directory, network and database of a lab.

    directory: everything the lab writes.
    database_port: of MariaDB beside `accounting` (slurmdbd); both None without accounting.
    """

    directory: Path
    control: Host
    nodes: tuple[Host, ...]
    accounting: Host | None = None
    database_port: int | None = None

    @property
    def munge(self) -> Path:
        return self.directory / "run/munge.socket"


def slurm_conf(layout: Layout) -> str:
    here = layout.directory
    return f"""\
ClusterName=lab
SlurmctldHost={layout.control.name}({layout.control.address})
SlurmctldPort={layout.control.port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job is held for cred_expire seconds: 120 unless told.
AuthInfo=socket={layout.munge},cred_expire=5
CredType=cred/munge
StateSaveLocation={here}/state
SlurmdSpoolDir={here}/spool/%n
SlurmctldPidFile={here}/run/slurmctld.pid
SlurmdPidFile={here}/run/%n.pid
SlurmctldLogFile={here}/logs/slurmctld.log
SlurmdLogFile={here}/logs/%n.log
SlurmctldDebug=debug
SlurmdDebug=debug
PlugStackConfig={here}/etc/plugstack.conf
# Nodes share one kernel and its control groups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
# Nodes claim more CPUs than the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
# Preemption as production has it: the user's signal, then grace, then requeue.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
JobRequeue=1
# Everything that a test waits for, shortened.
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdTimeout=15
SlurmctldTimeout=30
KillWait=5
MinJobAge=600
FirstJobId=1
MessageTimeout=20
{_accounting(layout)}\
{"".join(_node(layout, node) for node in layout.nodes)}\
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def _node(layout: Layout, node: Host) -> str:
    return (
        f"NodeName={node.name} NodeAddr={node.address} Port={node.port} CPUs=16 SocketsPerBoard=1 "
        f"CoresPerSocket=16 ThreadsPerCore=1 RealMemory=8000 Gres=gpu:h100:{GPUS_PER_NODE} State=UNKNOWN\n"
    )


def _accounting(layout: Layout) -> str:
    if layout.accounting is None:
        return "AccountingStorageType=accounting_storage/none\n"
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={layout.accounting.address}
AccountingStoragePort={layout.accounting.port}
AccountingStoragePass={layout.munge}
AccountingStorageTRES=gres/gpu
"""


def gres_conf() -> str:
    return f"Name=gpu Type=h100 File=/dev/nvidia[0-{GPUS_PER_NODE - 1}]\n"


def slurmdbd_conf(layout: Layout) -> str:
    assert layout.accounting is not None
    return f"""\
AuthType=auth/munge
AuthInfo=socket={layout.munge}
DbdHost={layout.accounting.name}
DbdAddr={layout.accounting.address}
DbdPort={layout.accounting.port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={layout.database_port}
StorageUser=slurm
StorageLoc=slurm_acct_db
LogFile={layout.directory}/logs/slurmdbd.log
PidFile={layout.directory}/run/slurmdbd.pid
"""


def hosts(layout: Layout) -> str:
    """/etc/hosts of every machine of the lab."""
    names = "".join(f"{host.address} {host.name}\n" for host in (layout.control, *layout.nodes))
    return "127.0.0.1 localhost\n" + names


def clusters_yaml(layout: Layout, python: str) -> str:
    """Profiles for mrl: on the nodes as they are, and in a container (of the stand-in for pyxis)."""
    here = layout.directory
    return f"""\
default: lab
clusters:
  lab:
    partition: low
    gpus_per_node: {GPUS_PER_NODE}
    container: null
    run_root: {here}/share
    python: {python}
  lab-pyxis:
    partition: low
    gpus_per_node: {GPUS_PER_NODE}
    container: {{image: {here}/etc/image.sqsh, mounts: ["/usr:/usr:ro"]}}
    run_root: {here}/share
    python: {python}
"""
