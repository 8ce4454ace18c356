"""Pure: what happens to the job after an attempt, by the ledger of the run and the verdict on this attempt.

    finished                         DONE; never starts again
    configuration error              held: it would fail the same way
    stopped by the user              does not start again, whatever else happened; mrl resume continues
    preempted, requeue               starts again; unlimited
    node failure                     starts again without the dead nodes, in the same allocation if the others are
                                     enough; unlimited
    time limit, bad nodes, signal    starts again; held after several in a row that saved nothing
    shared disk full                 starts again after a quarter of an hour; unlimited
    a node's own disk full           a crash on that node: starts again at once without it
    crash, hang, lost                starts again after a pause, which doubles; without a node where it happened twice;
                                     held after the same error at the same step on two nodes, or after three crashes
                                     without a new checkpoint

Further attempts in a row that save nothing wait for a doubling pause too. Held: the job ends as failed, and waits until
the user has looked at it and calls `mrl resume`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.judge.nodes import DISK_FULL, NOT_UNPACKED
from launcher.host.judge.verdict import NODES_DISK, NOT_STARTED, Verdict
from megatron_rl.contract.attempt_records import AttemptEnd, Drain, LedgerLine
from megatron_rl.contract.codes import (
    BAD_NODES,
    CANCELLED,
    CRASHED,
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FINISHED,
    FINISHED,
    LOST,
    MISCONFIGURED,
    NODE_FAILURE,
    REQUEUE,
    SIGNALLED,
    STOPPED,
    TIME_LIMIT,
)

# Next action for the job: `then` of an end in the ledger
BY_US = "requeue"  # the host side calls scontrol requeue
BY_SLURM = "slurm"  # Slurm has requeued the job already
SUCCESSOR = "successor"  # the job cannot be requeued, so a successor is submitted
STAYS = "stays"  # the host side starts the next attempt in the same allocation, on the nodes that are left
HELD = "held"  # the job waits for the user
OVER = "over"  # nothing, and nothing is wrong
STARTS_AGAIN = (BY_US, BY_SLURM, SUCCESSOR, STAYS)

# Cause -> attempts in a row that saved nothing, after which the run is held. Preemptions do not count, since they are
# no fault and end by themselves.
IN_VAIN = {BAD_NODES: 5, TIME_LIMIT: 3, SIGNALLED: 5, None: 5}
FREE_TRIES = 10  # attempts in a row that saved nothing, after which the next one waits
CRASHES = 3  # crashes without a new checkpoint after which the run is held
LOSSES = 5  # node failures in a row that one allocation survives
LONGEST_BACKOFF_S = 900.0  # seconds
ROOM_AGAIN_S = 900.0  # seconds until a run checks again whether the disk has room

_READ_ONLY = re.compile("Read-only file system: ")  # only at the start: later in a text it may be the container's
ON_A_NODE = (NOT_STARTED, NOT_UNPACKED, NODES_DISK)  # beginnings of errors that may be about a node's own disk

MAKE_ROOM = "make room there; the run resumes from its newest checkpoint"


class Facts(NamedTuple):
    checkpoint: int = 0  # step of the newest checkpoint, 0: none
    can_return: bool = True  # whether it is a batch job that has not ended
    requeueable: bool = True
    returning: bool = False  # whether Slurm has put it back into its queue already
    bad: Sequence[str] = ()  # nodes that failed the health check
    dead: Sequence[str] = ()  # nodes that Slurm has lost
    suffice: bool = False  # whether the allocation survives without them, and the others are enough
    backoff_s: float = 30.0  # seconds to wait after the first crash


class Decision(NamedTuple):
    outcome: str  # for the ledger
    cause: str | None
    then: str
    exit_code: int
    message: str  # why it is held, or what the user can do; may be empty
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()  # nodes that the job should not get again
    crashes: int = 0  # crashes without a new checkpoint, this one included


def decide(history: Sequence[LedgerLine], verdict: Verdict, drain: Drain | None, facts: Facts) -> Decision:
    """Decide about the job of an attempt that ended, by the ledger's lines of earlier attempts, oldest first."""
    cause = drain.cause if drain else None
    if verdict.outcome == FINISHED:
        return Decision(FINISHED, cause, OVER, EXIT_FINISHED, "")
    if verdict.outcome == MISCONFIGURED:
        return Decision(MISCONFIGURED, cause, HELD, EXIT_CONFIG, "the configuration must be changed")
    if cause == CANCELLED:
        if verdict.outcome == CRASHED:
            return Decision(CRASHED, cause, OVER, EXIT_CRASHED, "it was asked to stop")
        return Decision(STOPPED, cause, OVER, EXIT_FINISHED, "")
    hung_elsewhere = verdict.hung and verdict.node not in facts.dead
    if facts.dead and cause in (None, REQUEUE, SIGNALLED) and not hung_elsewhere:
        cause = NODE_FAILURE
    if (verdict.outcome == CRASHED and cause != NODE_FAILURE) or (verdict.outcome == LOST and cause is None):
        return _after_crash(since_held(history), verdict, cause, facts)
    outcome = LOST if verdict.outcome == CRASHED else verdict.outcome
    exclude = tuple(sorted(set(facts.bad) | set(facts.dead)))
    if drain is None and facts.suffice and not facts.returning and _losses(history) < LOSSES:
        return Decision(outcome, cause, STAYS, EXIT_DRAINED, "continues on the nodes that are left", exclude=exclude)
    again = Decision(outcome, cause, who_starts_it(facts), EXIT_DRAINED, "", exclude=exclude)
    if again.then == OVER:
        return again._replace(message="submit the run again to continue")
    this = AttemptEnd(0, 0.0, outcome, step=verdict.step, checkpoint=facts.checkpoint, cause=cause)
    in_vain = _in_vain([*since_held(history), this])
    alike = [*(end.cause == cause for end in reversed(in_vain)), False].index(False)
    if alike >= IN_VAIN.get(cause, alike + 1):
        message = f"{alike} attempts in a row ended with nothing new saved"
        return again._replace(outcome=CRASHED, then=HELD, exit_code=EXIT_CRASHED, message=message)
    return again._replace(delay_s=_backoff(facts, len(in_vain) - FREE_TRIES))


def _after_crash(history: list[AttemptEnd], verdict: Verdict, cause: str | None, facts: Facts) -> Decision:
    before = [end for end in history if is_crash(end)]
    crashes = 1 + len([end for end in before if end.checkpoint >= facts.checkpoint])
    last = before[-1] if before else None
    same_node = bool(last and verdict.node and verdict.node == last.node)
    suspicious = bool(verdict.node) and (same_node or _found_nodes_disk_full(verdict.error))
    if re.search(r"enroot-mount:|--container-mounts:", verdict.error or ""):  # the profile mounts it on every node
        suspicious = False
    suspects = {str(verdict.node)} if suspicious else set()
    decision = Decision(
        verdict.outcome,
        cause,
        who_starts_it(facts),
        EXIT_CRASHED,
        "",
        delay_s=_backoff(facts, crashes),
        exclude=tuple(sorted(suspects | set(facts.bad) | set(facts.dead))),
        crashes=crashes,
    )
    if found_disk_full(verdict.error):
        return decision._replace(delay_s=ROOM_AGAIN_S, crashes=0, message=MAKE_ROOM)
    if decision.then == OVER:
        return decision
    # The same error at the same step on two nodes is the run's own fault: a third start would fail too. On the same
    # node it says nothing, because the node may be broken, and so it is excluded first. An example with crashes at step
    # 12: node03, node03 -> node03 is excluded; node03, node07 -> held. Only where no other node was left, so that
    # node03 came back although it had been excluded, does a repetition there count. Two attempts without a known step
    # may have died at different places of the start: they are compared only if a rank, or a failure on all nodes, says
    # where.
    placed = last is not None and verdict.step == last.step and _knows_place(verdict) and _knows_place(last)
    repeated = placed and last is not None and _same(verdict.error, last.error)
    if repeated and last is not None and (not same_node or str(verdict.node) in last.excluded):
        message = "the same error at the same step twice"
        if verdict.step is None:
            where = "on all nodes" if _is_on_all_nodes(verdict) else "on two nodes"
            where = f"twice on {last.node}, beside which no other was left" if same_node else where
            message = f"the same error before the ranks had started, {where}"
        return decision._replace(then=HELD, message=message)
    if crashes >= CRASHES:
        return decision._replace(then=HELD, message=f"{crashes} crashes without a new checkpoint")
    return decision


def is_crash(end: AttemptEnd) -> bool:
    crashed = end.outcome == CRASHED or (end.outcome == LOST and end.cause is None)
    return crashed and not found_disk_full(end.error)


def found_disk_full(error: str | None) -> bool:
    full = DISK_FULL.search(error or "") or _READ_ONLY.match(error or "")
    return full is not None and not _found_nodes_disk_full(error)


def _found_nodes_disk_full(error: str | None) -> bool:
    """Whether this is the error of a full disk of one node, where containers are unpacked."""
    error = error or ""
    return error.startswith(ON_A_NODE) and DISK_FULL.search(error) is not None


def _knows_place(end: Verdict | AttemptEnd) -> bool:
    return (
        _is_on_all_nodes(end)
        or end.step is not None
        or (end.phase is None and not end.hung and (end.rank, end.node) != (None, None))
    )


def _is_on_all_nodes(end: Verdict | AttemptEnd) -> bool:
    return end.node is None and (end.error or "").startswith(NOT_UNPACKED)


def who_starts_it(facts: Facts) -> str:
    """Choose the way in which the job starts again: BY_US, BY_SLURM, SUCCESSOR, or OVER where it cannot.

    We requeue even a preempted job, although Slurm 24.05 and later requeue one that ends in its grace time: Slurm
    counts its own requeues in BatchFlag and holds the job once they exceed MaxBatchRequeue (default 5), but does not
    count `scontrol requeue`."""
    if not facts.can_return:
        return OVER
    if facts.returning:
        return BY_SLURM
    return BY_US if facts.requeueable else SUCCESSOR


def since_held(history: Sequence[LedgerLine]) -> list[AttemptEnd]:
    """Ends since the run was last held or stopped: a user who resumes it grants it all tries again."""
    ends = [line for line in history if isinstance(line, AttemptEnd)]
    final = [number for number, end in enumerate(ends) if end.then not in STARTS_AGAIN]
    return ends[final[-1] + 1 :] if final else ends


def _backoff(facts: Facts, failures: int) -> float:
    return min(facts.backoff_s * 2.0 ** min(failures - 1, 20), LONGEST_BACKOFF_S) if failures > 0 else 0.0


def _in_vain(ends: list[AttemptEnd]) -> list[AttemptEnd]:
    """Last attempts of a list that saved nothing new, whatever the cause. Ranks that did not leave in time record no
    step, though they may have saved earlier, so the newest checkpoint counts too."""
    # Ends (step saved, newest checkpoint): (40, 40), (None, 40), (None, 60), (None, 60), (None, 60). The third saved no
    # step when it ended but a checkpoint, 60, before that, so only the last two were in vain. Their causes do
    # not matter here: time passed, and nothing was kept.
    checkpoints = [end.checkpoint for end in ends]
    older = [checkpoints[0], *checkpoints]  # the checkpoint before the first attempt is unknown
    vain = [end.step is None and newest <= before for end, newest, before in zip(ends, checkpoints, older)]
    return ends[len(ends) - [*reversed(vain), False].index(False) :]


def _losses(history: Sequence[LedgerLine]) -> int:
    stayed = [line.then == STAYS for line in reversed(history) if isinstance(line, AttemptEnd)]
    return [*stayed, False].index(False)


def _same(error: str | None, other: str | None) -> bool:
    return error is not None and other is not None and _gist(error) == _gist(other)


def _gist(error: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", error)
