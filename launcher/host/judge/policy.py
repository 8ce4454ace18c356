"""Pure: what becomes of the job when an attempt has ended, by the ledger of the run and what is known of this end.

    finished                         DONE; nothing starts again
    configuration error              never started again: it would end the same way
    asked to stop by the user        not started again, whatever else went on; mrl resume goes on
    preempted, requeue               started again; uses up nothing
    node failure                     started again, without the dead nodes, in the same allocation where the others
                                     suffice; uses up nothing
    time limit, bad nodes, signal    started again, until several in a row have come to nothing: held
    shared disk full                 started again after a quarter of an hour; uses up nothing
    a node's own disk full           a crash of that node's: without it, at once
    crash, hang, end without a word  started again after a while, which doubles; without the node where it happened
                                     twice; held after the same error at the same step on two nodes, or three without a
                                     new checkpoint

What comes to nothing again and again starts again after a while too. Held: the job ends as failed, and waits for
somebody to look and to `mrl resume`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from launcher.host.judge.nodes import NOT_UNPACKED
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

# What is done about the job: `then` of an end in the ledger
BY_US = "requeue"  # scontrol requeue
BY_SLURM = "slurm"  # it has requeued the job already
SUCCESSOR = "successor"  # the job cannot be requeued: another one is submitted
STAYS = "stays"  # in its allocation: the host side goes on with the nodes that are left
HELD = "held"  # nobody starts it again before somebody has looked
OVER = "over"  # nothing, and nothing is amiss with that
STARTS_AGAIN = (BY_US, BY_SLURM, SUCCESSOR, STAYS)

# Attempts in a row with nothing to show, after which somebody should look. Preemptions do not count: nobody made a
# mistake, and they end.
IN_VAIN = {BAD_NODES: 5, TIME_LIMIT: 3, SIGNALLED: 5, None: 5}
FREE_TRIES = 10  # attempts in a row with nothing to show, after which the next one waits a while
CRASHES = 3  # without a new checkpoint
LOSSES = 5  # of nodes in a row with which one allocation goes on
LONGEST_BACKOFF_S = 900.0
ROOM_AGAIN_S = 900.0  # after which a run looks again whether the disk has room

_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_READ_ONLY = re.compile("Read-only file system: ")  # of the run directory; what a rank reports may be its container's
ON_A_NODE = (NOT_STARTED, NOT_UNPACKED, NODES_DISK)  # how errors begin that may be of a node's own disk

MAKE_ROOM = "make room there; the run goes on from its newest checkpoint"


class Facts(NamedTuple):
    """What is known when an attempt has ended, beside what it left behind."""

    checkpoint: int = 0  # step of the newest, 0: none
    can_return: bool = True  # neither a local run or an allocation that somebody works in, nor a job that is over
    requeueable: bool = True
    returning: bool = False  # Slurm has it back in its queue already
    bad: Sequence[str] = ()  # nodes that failed the health check
    dead: Sequence[str] = ()  # nodes that Slurm has lost
    suffice: bool = False  # the allocation outlives them, and the others are enough
    backoff_s: float = 30.0  # after the first crash


class Decision(NamedTuple):
    """What becomes of the job."""

    outcome: str  # for the ledger
    cause: str | None
    then: str
    exit_code: int
    message: str  # why it is held, or what somebody can do; empty where there is nothing to add
    delay_s: float = 0.0
    exclude: tuple[str, ...] = ()  # nodes that the job should not get again
    crashes: int = 0  # how many there were without a new checkpoint, this one included


def decide(history: Sequence[LedgerLine], verdict: Verdict, drain: Drain | None, facts: Facts) -> Decision:
    """What to do with the job of an attempt that ended.

    Args:
        history: the ledger's lines of earlier attempts, oldest first.
        drain: the request to leave, where there was one.
    """
    cause = drain.cause if drain else None
    if verdict.outcome == FINISHED:
        return Decision(FINISHED, cause, OVER, EXIT_FINISHED, "")
    if verdict.outcome == MISCONFIGURED:
        return Decision(MISCONFIGURED, cause, HELD, EXIT_CONFIG, "the configuration has to be changed")
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
        return Decision(outcome, cause, STAYS, EXIT_DRAINED, "goes on with the nodes that are left", exclude=exclude)
    again = Decision(outcome, cause, who_starts_it(facts), EXIT_DRAINED, "", exclude=exclude)
    if again.then == OVER:
        return again._replace(message="submit the run again to go on")
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
    suspicious = verdict.node and (same_node or _found_nodes_disk_full(verdict.error))
    suspects = {str(verdict.node)} if suspicious and not _is_wrong_everywhere(verdict.error) else set()
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
    if last is not None and _same_place(verdict, last) and _same(verdict.error, last.error):
        elsewhere = not same_node or str(verdict.node) in last.excluded  # it was to be avoided, and could not be
        if elsewhere:
            message = "the same error at the same step twice"
            if verdict.step is None:
                message = "the same error before the ranks had started, on two nodes"
            return decision._replace(then=HELD, message=message)
    if crashes >= CRASHES:
        return decision._replace(then=HELD, message=f"{crashes} crashes without a new checkpoint")
    return decision


def is_crash(end: AttemptEnd) -> bool:
    """Whether the end of an attempt, as the ledger has it, is one that the run itself has to answer for."""
    crashed = end.outcome == CRASHED or (end.outcome == LOST and end.cause is None)
    return crashed and not found_disk_full(end.error)


def found_disk_full(error: str | None) -> bool:
    """Whether this is the error of something that found no room on the disk that all nodes share."""
    full = _FULL.search(error or "") or _READ_ONLY.match(error or "")
    return full is not None and not _found_nodes_disk_full(error)


def _found_nodes_disk_full(error: str | None) -> bool:
    """Whether it found no room on a disk of its node: that is where containers are unpacked."""
    error = error or ""
    return error.startswith(ON_A_NODE) and _FULL.search(error) is not None


def _same_place(end: Verdict, last: AttemptEnd) -> bool:
    """Whether two attempts are known to have ended at the same step, or both when their ranks were being started."""
    return end.step == last.step and _knows_place(end) and _knows_place(last)


def _knows_place(end: Verdict | AttemptEnd) -> bool:
    return end.step is not None or (end.phase is None and not end.hung and (end.rank, end.node) != (None, None))


def _is_wrong_everywhere(error: str | None) -> bool:
    """Whether this is the error of a mount that the container could not have: the profile asks for it on every node."""
    return re.search(r"enroot-mount:|--container-mounts:", error or "") is not None


def who_starts_it(facts: Facts) -> str:
    """Who starts the job again.

    A preempted job is requeued by us like any other, although Slurm 24.05 and later requeues one that ends in its grace
    time by itself. Slurm counts its own requeues in BatchFlag and holds the job once they exceed MaxBatchRequeue
    (default 5); it does not count `scontrol requeue`.
    """
    if not facts.can_return:
        return OVER
    if facts.returning:
        return BY_SLURM
    return BY_US if facts.requeueable else SUCCESSOR


def since_held(history: Sequence[LedgerLine]) -> list[AttemptEnd]:
    """The ends since somebody last had a look: whoever resumes a run grants it all its tries again."""
    ends = [line for line in history if isinstance(line, AttemptEnd)]
    final = [number for number, end in enumerate(ends) if end.then not in STARTS_AGAIN]
    return ends[final[-1] + 1 :] if final else ends


def _backoff(facts: Facts, failures: int) -> float:
    """Seconds to wait after so many failures in a row; they double."""
    return min(facts.backoff_s * 2.0 ** min(failures - 1, 20), LONGEST_BACKOFF_S) if failures > 0 else 0.0


def _in_vain(ends: list[AttemptEnd]) -> list[AttemptEnd]:
    """Attempts at the end of these that ended with nothing new saved, for whatever cause. Ranks that did not leave in
    time name no step, though they may have saved before."""
    checkpoints = [end.checkpoint for end in ends]
    older = [checkpoints[0], *checkpoints]  # what was there before the first is not known
    vain = [end.step is None and newest <= before for end, newest, before in zip(ends, checkpoints, older)]
    return ends[len(ends) - [*reversed(vain), False].index(False) :]


def _losses(history: Sequence[LedgerLine]) -> int:
    """Attempts just before this one after which the same allocation went on."""
    went_on = [line.then == STAYS for line in reversed(history) if isinstance(line, AttemptEnd)]
    return [*went_on, False].index(False)


def _same(error: str | None, other: str | None) -> bool:
    """Addresses, ports, ranks and losses in a message differ from one time to the next."""
    return error is not None and other is not None and _gist(error) == _gist(other)


def _gist(error: str) -> str:
    return re.sub(r"0x[0-9a-fA-F]+|\d+", "#", error)
