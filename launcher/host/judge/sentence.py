"""Pure: the end of an attempt, as the ledger records it, in one line for the user."""

from __future__ import annotations

from launcher.host.judge.policy import BY_SLURM, CRASHES, HELD, STARTS_AGAIN, found_disk_full, is_crash
from megatron_rl.contract.attempt_records import AttemptEnd
from megatron_rl.contract.codes import CRASHED, DRAINED, FINISHED, LOST, MISCONFIGURED, STOPPED

ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def describe_end(end: AttemptEnd, now: float) -> str:
    """`saved after step 40 (preempted)`; `crashed at step 40: rank 1 on node03: RuntimeError: boom; starts again in 4
    min, 2nd of at most 3 without a new checkpoint`."""
    return "; ".join(filter(None, [_outcome(end), _then(end, now), _without(end)]))


def _outcome(end: AttemptEnd) -> str:
    outcome, step = end.outcome, end.step
    cause = f" ({end.cause})" if end.cause else ""
    if outcome == FINISHED:
        return f"finished after step {step}"
    if outcome in (DRAINED, STOPPED):
        return (f"saved after step {step}" if step else "left without a new checkpoint") + cause
    if outcome == LOST:
        return (end.error or "it left no record") + cause
    what = {CRASHED: "hung" if end.hung else "crashed", MISCONFIGURED: "wrong configuration"}.get(outcome, outcome)
    if outcome == CRASHED and found_disk_full(end.error):
        what = "the disk is full: it stopped"
    if outcome == CRASHED and step is not None:
        what += f" at step {step}"
    if outcome == CRASHED and end.phase:
        what += f" ({end.phase})"
    who = f"rank {end.rank}" if end.rank is not None else ""
    if who and end.node:
        who += f" on {end.node}"
    return ": ".join(filter(None, [what, who, end.error])) + cause


def _then(end: AttemptEnd, now: float) -> str:
    then, why = end.then, end.why
    if then == HELD:
        return f"held: {why}" if why != end.error else "held"
    if then not in STARTS_AGAIN or not is_crash(end):
        return why
    again = "starts again"
    if end.not_before and end.not_before > now and then != BY_SLURM:
        again += f" in {_span(end.not_before - now)}"
    crashes = max(end.crashes, 1)
    return f"{again}, {ORDINALS.get(crashes, crashes)} of at most {CRASHES} without a new checkpoint"


def _without(end: AttemptEnd) -> str:
    if not end.excluded or end.then not in STARTS_AGAIN:
        return ""
    return f"without {', '.join(end.excluded)}, if enough others are left"


def _span(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
