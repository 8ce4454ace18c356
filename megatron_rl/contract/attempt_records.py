"""Records in attempts/NNN/ of a single attempt, and the ledger's two lines about it.

Times are Unix seconds by the writer's clock, durations are seconds. A rank is its number in the world of its step. The
host side is the batch host's process of a Slurm job or the supervisor of a local run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

from megatron_rl.contract.codes import EXIT_CRASHED
from megatron_rl.contract.shapes import record


@record()
class Drain(NamedTuple):
    """drain.json: a request to leave at the next safe point. The existence of the file is the request, whatever it
    contains.

    Written by the process asked to end the attempt: the host side, `mrl cancel` and `mrl requeue`, mrl-submit at
    Ctrl-C, or a rank that received a signal. Completed by the host side. Read by the host side, rank 0 and the views.
    """

    cause: str  # one of codes; in a local run also the name of a signal
    by: str  # who or what asked, for people
    at: float
    deadline: float | None = None  # when the processes must have ended; None: not known yet
    end: float | None = None  # when Slurm ends the job, as it answered


@record()
class Outcome(NamedTuple):
    """outcome.json: the ranks ended cleanly. Written by rank 0 after its last save, read by the host side."""

    outcome: str  # FINISHED or DRAINED
    step: int | None = None  # of the newest checkpoint; None: there is none
    why: str = ""  # why it finished before its last step


@record()
class RankError(NamedTuple):
    """error.RANK.json: why a rank failed. Written by that rank, read by the host side and the views."""

    rank: int
    host: str
    step: int
    phase: str
    error: str  # one line; for a bad configuration, the whole message
    traceback: str = ""
    waited: bool = False  # a collective timed out, because another rank did not join
    log: list[str] = []  # the newest lines of its log, oldest first
    exit_code: int = EXIT_CRASHED
    at: float = 0.0


@record()
class Heartbeat(NamedTuple):
    """The latest progress of a rank, in a slot of heartbeats/N.beats (`heartbeat_files`). Written by a thread of the
    rank, which keeps running while its work hangs; read by the host side."""

    rank: int
    ranks: int  # of the world
    host: str | None  # None: a placeholder of the host side for a rank that never sent one
    phase: str  # HEARTBEAT_WAIT: it waits for others; HEARTBEAT_LEFT: it leaves cleanly
    step: int
    entered: int  # number of phases entered; all ranks enter the same ones in the same order
    at: float  # when the rank last made progress
    written: float
    every: float  # seconds until the next one


@record()
class Hang(NamedTuple):
    """hang.json: the rank that was silent for too long. Written by the host side before it kills the ranks for it, or
    by training rank 0 about a replica that does not leave the devices of the ranks, to have it killed. Read by the host
    side, also when it judges the attempt."""

    rank: int
    host: str | None  # None: it never sent a heartbeat
    phase: str
    step: int
    silent_s: float
    at: float


@record()
class UsedKernels(NamedTuple):
    """kernels.json: kernels and libraries in use on the device. Written by rank 0 when it starts, for people."""

    transformer_impl: str  # transformer_engine or local
    reason: str  # reason for that choice
    attention: str  # for people
    fp8: str | None = None  # format of the layers' matrix products; None: the model's own type
    decoding: str = ""  # for people: whether CUDA graphs are used, and why
    experts: str = ""  # for people: whether the experts of a layer are multiplied all at once, and why not


@record()
class Progress(NamedTuple):
    """progress.json: the current phase of rank 0. Written by rank 0, read by the live view."""

    phase: str
    step: int


@record()
class NodeAssignment(NamedTuple):
    """nodes.json: the assignment of nodes to steps. Written by the host side before the steps start; read by the host
    side and by `mrl attach`."""

    working: int  # nodes of the plan that this attempt follows; 0: too few are healthy for any plan
    steps: dict[str, list[str]]  # step -> its hosts, in the order of the plan's nodes
    spare: list[str]  # healthy and idle
    bad: dict[str, str]  # host -> reason why it is not used


@record()
class Marks(NamedTuple):
    """marks.json: milestones of the start of an attempt. Written by the host side, read by its goodput."""

    image: float | None = None  # when the container image was available
    ready: float | None = None  # when the nodes had been chosen, and the ranks were about to start


@record()
class Requeued(NamedTuple):
    """requeued.json: the action that the ledger's end intends was taken on the job, or why it failed. Written by the
    host side that ends the attempt, read by that of the next one and by `mrl status`."""

    at: float
    avoided: list[str] | None = None  # nodes that the job avoids; None: undecided
    problem: str | None = None  # what Slurm or the disk rejected
    queued: bool = True  # whether the job, or its successor, is in Slurm's queue
    postponed: bool = True  # whether it waits until the ledger's `not_before`, if that is set


@record()
class NodeHealth(NamedTuple):
    """health/HOST.json: the health of a node. Written by the check on that node, read by the batch host."""

    host: str
    at: float
    ok: bool
    problems: list[str]  # reasons why it is not
    skipped: list[str] = []  # checks that could not run
    gpus: int | None = None
    shm_free_mib: int | None = None
    canary_s: float | None = None  # seconds to write and read a megabyte on the shared file system
    network_gbps: float | None = None  # Gb/s of all active ports of its RDMA adapters


@record(version=None)
class AllReduce(NamedTuple):
    """Measurement of the slowest rank of a group, or the reason why there is none."""

    gbps: float | None = None  # bus bandwidth, 1e9 bytes per second
    seconds: float | None = None  # of one all-reduce
    error: str | None = None
    unusable: bool = False  # whether the rank failed before it met others, because it cannot use its own device


@record(version=None)
class PairAllReduce(NamedTuple):
    """Measurement of two neighbouring nodes."""

    hosts: list[str]
    gbps: float | None = None
    seconds: float | None = None
    error: str | None = None


@record()
class FabricReport(NamedTuple):
    """fabric.json: results of the all-reduce check between the nodes. Written by its rank 0, read by the batch host."""

    hosts: list[str]  # hosts whose ranks all joined
    bad: dict[str, str]  # host -> reason why it must not be used
    whole: AllReduce | None = None  # of all of them together
    pairs: list[PairAllReduce] = []  # measured only if the whole was bad
    unexplained: bool = False  # the whole was bad, and no single node explains it
    slower_than: float | None = None  # gbps below which a group is bad
    seconds: float = 0.0  # duration of the check


@record()
class Address(NamedTuple):
    """addresses/NAME.json: the address of a listener of this attempt. Written by the listener, read by its clients."""

    host: str
    port: int


@record()
class ReplicaAddress(NamedTuple):
    """replicas/K/address.json: the address of an inference replica that accepts requests. Written by its rank 0, read
    by the training ranks."""

    replica: int
    start: int  # number of earlier starts in this attempt
    host: str
    port: int
    ranks: int
    digest: str  # SHA-256 of its resolved.yaml
    protocol: int  # version of the protocol
    at: float
    transport: str = "gloo"  # of tensors, that its ranks have: gloo, or nccl with its release


@record()
class ReplicaState(NamedTuple):
    """replicas/K/state.json: the host side's view of an inference replica. Written by the host side with every change;
    read by the training ranks, which wait for no replica that is given up, by the judge of the attempt's end and by the
    views."""

    replica: int
    state: str  # one of codes
    starts: int  # in this attempt
    at: float  # since when
    hosts: list[str] = []  # hosts of the replica; empty in a local run
    why: str | None = None  # how it ended last, with its rank; None: it never ended
    misconfigured: bool = False  # whether it would end the same way again
    job: str | None = None  # its Slurm job's id; None: it runs in the attempt's job


@record(version=None)
class SlowestRank(NamedTuple):
    """The rank that the others waited for most, by its seconds in one category of the timeline.
    rank/metrics/timeline.py says how it is found."""

    rank: int
    seconds: float  # of that rank
    others: float  # median over the other ranks


@record(version=None)
class TimeTotal(NamedTuple):
    """Sum over all lines of a timeline up to the one that has it, as `time_total.of_one_rank` counts them."""

    seconds: dict[str, float]  # category -> seconds of one rank
    known: float  # their sum
    unknown: float  # seconds that no line accounts for


@record(version=None)
class TimelineLine(NamedTuple):
    """A line of timeline.jsonl: the stretch of time since the line before it. Written by rank 0; read by goodput and by
    exporters of the record."""

    at: float  # mean over the ranks
    step: int
    seconds: dict[str, float]  # category -> seconds, summed over all ranks
    began: float | None = None  # in the first line: when the ranks began, mean over the ranks
    ranks: int | None = None  # in the first line
    resumed: int | None = None  # in the first line after loading: step of the resumed checkpoint
    slowest: dict[str, SlowestRank] | None = None  # category -> its slowest rank; None: there is one rank only
    total: TimeTotal | None = None  # in some lines


@record(event="start")
class AttemptStart(NamedTuple):
    """Line of attempts.jsonl for the start of an attempt. Written by the host side; read by the host side, by `mrl
    status` and by rank 0, which derives the save interval from the ledger."""

    attempt: int
    at: float
    host: str = ""  # host of the writer
    job_id: str | None = None  # of Slurm; None: a local run
    cluster: str | None = None
    restart: int = 0  # number of times that Slurm had requeued the job
    nodes: list[str] = []  # of the allocation
    gpus: int | None = None  # of the allocation
    submitted_at: float | None = None
    held_since: float | None = None  # when the allocation began
    pid: int | None = None  # of the supervisor of a local run
    ranks: int | None = None  # of a local run
    generating: int = 0  # number of its GPUs or ranks that only generate


@record(event="end")
class AttemptEnd(NamedTuple):
    """Line of attempts.jsonl for the end of an attempt: how it ended, and what happens to the job next. Written by the
    host side of the same start or of the next one; read like AttemptStart."""

    attempt: int
    at: float
    outcome: str  # one of codes
    host: str = ""  # host that ran the attempt
    step: int | None = None  # saved step (finished, drained), or step of the failure
    error: str | None = None  # one line
    rank: int | None = None  # rank of the error
    node: str | None = None  # node of that rank
    phase: str | None = None  # phase of that rank
    hung: bool = False  # it stopped responding, and the ranks were killed for it
    checkpoint: int = 0  # step of the newest checkpoint at that time; 0: none
    cause: str | None = None  # one of codes; in a local run also the name of a signal; None: nobody asked it to end
    then: str | None = None  # next action on the job (launcher.host.judge.policy); None: a local run
    why: str = ""  # why the job is held, or the run finished before its last step, or advice for the user
    crashes: int = 0  # consecutive crashes without a new checkpoint, including this one
    excluded: list[str] = []  # nodes that the job should avoid
    not_before: float | None = None  # when it may start again
    exit_code: int | None = None  # of the batch script
    job_id: str | None = None
    seconds: float | None = None  # duration of the attempt; None: unknown, because this line was written later


LedgerLine = Union[AttemptStart, AttemptEnd]
LEDGER = (AttemptStart, AttemptEnd)  # read_lines(LEDGER, run.attempts_ledger)


@record(version=None, rest="values")
class MetricsLine(NamedTuple):
    """A line of metrics.jsonl (one per step) or of evaluations.jsonl (one per evaluation): {"step": 1, "loss": 0.2,
    ...}. Written by rank 0; read by the views and the report. It is one flat object without a
    version, because people read it with their own tools."""

    step: int
    values: dict[str, Any]  # name in rank/metrics/names.py -> value; numbers are finite
