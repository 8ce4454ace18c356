"""What stands in attempts/NNN/, of one attempt alone, and the two lines that the ledger has of it.

Times are unix seconds by the writer's clock, durations seconds. A rank is its number in the world of its step. The
host side is the batch host's process of a Slurm job or the supervisor of a local run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Union

from megatron_rl.contract.codes import EXIT_CRASHED
from megatron_rl.contract.shapes import record


@record()
class Drain(NamedTuple):
    """drain.json: a request to leave at the next safe point. That it is there is the request, whatever it says.

    Written by whoever is asked to end the attempt: the host side, `mrl cancel` and `mrl requeue`, mrl-submit at Ctrl-C,
    a rank that a signal reached alone. Completed by the host side. Read by the host side, rank 0 and the views.
    """

    cause: str  # one of codes, or of a local run the name of a signal
    by: str  # who or what asked, in words
    at: float
    deadline: float | None = None  # when the processes are gone; None: nobody knows yet
    end: float | None = None  # when Slurm ends the job, as it said when it was asked


@record()
class Outcome(NamedTuple):
    """outcome.json: that the ranks end in order. Written by rank 0 after its last save, read by the host side."""

    outcome: str  # FINISHED or DRAINED
    step: int | None = None  # of the newest checkpoint; None: there is none


@record()
class RankError(NamedTuple):
    """error.RANK.json: why a rank failed. Written by that rank, read by the host side and the views."""

    rank: int
    host: str
    step: int
    phase: str
    error: str  # one line; of a bad configuration, its whole message
    traceback: str = ""
    waited: bool = False  # a collective timed out: another rank did not come
    log: list[str] = []  # the newest lines of its log, oldest first
    exit_code: int = EXIT_CRASHED
    at: float = 0.0


@record()
class Heartbeat(NamedTuple):
    """heartbeats/RANK.json: when a rank last got on with its work. Written by a thread of that rank, which goes on
    while the work hangs; read by the host side."""

    rank: int
    ranks: int  # of the world
    host: str | None  # None: of a rank that never sent one, as the host side imagines it
    phase: str  # HEARTBEAT_WAIT: it waits for others; HEARTBEAT_LEFT: it leaves in order
    step: int
    entered: int  # phases so far; all ranks enter the same ones in the same order
    at: float  # of the last sign of work
    written: float
    every: float  # seconds to the next one


@record()
class Hang(NamedTuple):
    """hang.json: the rank that was silent for too long. Written by the host side before it ends the ranks for it, read
    by it when it judges the attempt."""

    rank: int
    host: str | None  # None: it never said a word
    phase: str
    step: int
    silent_s: float
    at: float


@record()
class Kernels(NamedTuple):
    """kernels.json: what does the work of the device. Written by rank 0 when it starts, for people."""

    transformer_impl: str  # transformer_engine or local
    reason: str  # why that one
    attention: str  # in words
    fp8: str | None = None  # format of the layers' products; None: the model's own type
    decoding: str = ""  # in words: by graphs or operation by operation, and why


@record()
class Progress(NamedTuple):
    """progress.json: what rank 0 is doing. Written by it, read by the live view."""

    phase: str
    step: int


@record()
class NodeAssignment(NamedTuple):
    """nodes.json: which node does what. Written by the host side before the steps start, read by it and by
    `mrl attach`."""

    working: int  # nodes of the plan that this attempt follows; 0: too few are fit for any
    steps: dict[str, list[str]]  # step -> its hosts, in the order of the plan's nodes
    spare: list[str]  # fit and idle
    bad: dict[str, str]  # host -> why it is not used


@record()
class Marks(NamedTuple):
    """marks.json: how far the start of an attempt got. Written by the host side, read by its goodput."""

    image: float | None = None  # when the container image was there
    ready: float | None = None  # when the nodes had been chosen, and the ranks were about to start


@record()
class Requeued(NamedTuple):
    """requeued.json: that what the ledger's end intends was done about the job, or what of it could not be. Written by
    the host side that ends the attempt, read by that of the next one and by `mrl status`."""

    at: float
    avoided: list[str] | None = None  # nodes that the job stays away from; None: undecided
    problem: str | None = None  # what Slurm or the disk refused
    queued: bool = True  # whether Slurm has the job, or its successor, in its queue
    postponed: bool = True  # whether it waits there until the ledger's `not_before`, where that is given


@record()
class NodeHealth(NamedTuple):
    """health/HOST.json: whether a node is fit to compute. Written by the check on that node, read by the batch host."""

    host: str
    at: float
    ok: bool
    problems: list[str]  # why it is not
    skipped: list[str] = []  # what could not be looked at
    gpus: int | None = None
    shm_free_mib: int | None = None
    canary_s: float | None = None  # a megabyte to the shared file system and back
    network_gbps: float | None = None  # Gb/s of all active ports of its RDMA adapters


@record(version=None)
class AllReduce(NamedTuple):
    """What the slowest rank of a group measured, or why nobody could."""

    gbps: float | None = None  # bus bandwidth, 1e9 bytes a second
    seconds: float | None = None  # of one all-reduce
    error: str | None = None
    tflops: float | None = None  # of matrix products on this GPU alone, 1e12 a second; not on CPUs


@record(version=None)
class PairAllReduce(NamedTuple):
    """The same of two neighbouring nodes."""

    hosts: list[str]
    gbps: float | None = None
    seconds: float | None = None
    error: str | None = None


@record()
class FabricReport(NamedTuple):
    """fabric.json: what the all-reduce between the nodes found. Written by its rank 0, read by the batch host."""

    hosts: list[str]  # all of whose ranks came
    bad: dict[str, str]  # host -> why it must not be used
    whole: AllReduce | None = None  # of all of them together
    pairs: list[PairAllReduce] = []  # where the whole was bad
    unexplained: bool = False  # the whole was bad, and no single node explains it
    slower_than: float | None = None  # gbps below which a group is bad
    seconds: float = 0.0  # that the check took


@record()
class Address(NamedTuple):
    """addresses/NAME.json: where a listener of this attempt is reached. Written by it, read by those who call it."""

    host: str
    port: int


@record()
class ReplicaAddress(NamedTuple):
    """replicas/K/address.json: where an inference replica is asked, once it can be. Written by its rank 0, read by the
    ranks that train."""

    replica: int
    start: int  # how often it was started in this attempt before
    host: str
    port: int
    ranks: int
    digest: str  # SHA-256 of its resolved.yaml
    protocol: int  # of what is said there
    at: float


@record()
class ReplicaState(NamedTuple):
    """replicas/K/state.json: what the host side makes of an inference replica. Written by it with every change; read by
    the ranks that train, which wait for none that is given up, by the judge of the attempt's end and by the views."""

    replica: int
    state: str  # one of codes
    starts: int  # in this attempt
    at: float  # since when
    hosts: list[str] = []  # that it runs on; a local run names none
    why: str | None = None  # how it ended last, with its rank; None: it never has
    misconfigured: bool = False  # and by that it would end so again
    job: str | None = None  # id of the Slurm job of its own that runs it; None: it runs in that of the attempt


@record(version=None)
class TimelineLine(NamedTuple):
    """A line of timeline.jsonl: a stretch of time since the line before it. Written by rank 0, read by goodput and by
    what shows the record elsewhere."""

    at: float  # mean over the ranks
    step: int
    seconds: dict[str, float]  # category -> seconds, summed over all ranks
    began: float | None = None  # in the first line: when the ranks began, mean over them
    ranks: int | None = None  # in the first line
    resumed: int | None = None  # in the line that follows the load: step of the checkpoint that was gone on from


@record(event="start")
class AttemptStart(NamedTuple):
    """The line of attempts.jsonl for the start of an attempt. Written by the host side; read by it, by `mrl status` and
    by rank 0, which judges by the ledger how often to save."""

    attempt: int
    at: float
    host: str = ""  # that writes this
    job_id: str | None = None  # of Slurm; None: a local run
    cluster: str | None = None
    restart: int = 0  # how often Slurm had requeued the job
    nodes: list[str] = []  # of the allocation
    gpus: int | None = None  # of the allocation
    submitted_at: float | None = None
    held_since: float | None = None  # when the allocation began
    pid: int | None = None  # of the supervisor of a local run
    ranks: int | None = None  # of a local run
    generating: int = 0  # of its GPUs or ranks, those that only generate


@record(event="end")
class AttemptEnd(NamedTuple):
    """The line of attempts.jsonl for the end of an attempt: how it ended, and what is to become of the job. Written by
    the host side, of the same start or of the next one; read as AttemptStart is."""

    attempt: int
    at: float
    outcome: str  # one of codes
    host: str = ""  # that ran the attempt
    step: int | None = None  # safe on disk (finished, drained), or where it happened
    error: str | None = None  # one line
    rank: int | None = None  # whose error it is
    node: str | None = None  # where that rank was
    phase: str | None = None  # what it was doing
    hung: bool = False  # it said nothing any more, and the ranks were ended for it
    checkpoint: int = 0  # step of the newest checkpoint then; 0: none
    cause: str | None = None  # one of codes, or of a local run the name of a signal; None: nobody asked it to end
    then: str | None = None  # what becomes of the job (launcher.host.judge.policy); None: a local run
    why: str = ""  # it is held, or what somebody can do
    crashes: int = 0  # without a new checkpoint, this one included
    excluded: list[str] = []  # nodes that the job should not get again
    not_before: float | None = None  # when it may start again
    exit_code: int | None = None  # of the batch script
    job_id: str | None = None
    seconds: float | None = None  # of the attempt; None: whoever ran it could not say, this was written later


LedgerLine = Union[AttemptStart, AttemptEnd]
LEDGER = (AttemptStart, AttemptEnd)
"""Lines of attempts.jsonl: read_lines(LEDGER, run.attempts_ledger)."""


@record(version=None, rest="values")
class MetricsLine(NamedTuple):
    """A line of metrics.jsonl, one a step, or of evaluations.jsonl, one an evaluation: {"step": 1, "loss": 0.2, ...}.
    Written by rank 0; read by the views, the report, the exactly-once checker, and by people with tools of their own,
    for whom it stays one flat object without a version."""

    step: int
    values: dict[str, Any]  # name in metrics/names.py -> value; never a number that is not finite
