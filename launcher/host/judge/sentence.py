"""Pure: the end of an attempt, as the ledger has it, in one line."""

from typing import Any, Dict

from launcher.host.judge.policy import BY_SLURM, CRASHES, HELD, STARTS_AGAIN, STOPPED, is_crash
from launcher.host.judge.verdict import CRASHED, DRAINED, FINISHED, LOST, MISCONFIGURED

ORDINALS = {1: "1st", 2: "2nd", 3: "3rd"}


def in_words(end: Dict[str, Any], now: float) -> str:
    """`saved after step 40 (preempted)`; `crashed at step 40: rank 1 on node03: RuntimeError: boom; starts again in 4
    min, 2nd of at most 3 without a new checkpoint`.

    Args:
        end: the ledger's line.
    """
    return "; ".join(filter(None, [_what(end), _then(end, now), _without(end)]))


def _what(end: Dict[str, Any]) -> str:
    outcome, step = end["outcome"], end.get("step")
    cause = " ({})".format(end["cause"]) if end.get("cause") else ""
    if outcome == FINISHED:
        return "finished after step {}".format(step)
    if outcome in (DRAINED, STOPPED):
        return ("saved after step {}".format(step) if step else "left without a new checkpoint") + cause
    if outcome == LOST:
        return (end.get("error") or "it left no record") + cause
    what = {CRASHED: "hung" if end.get("hung") else "crashed", MISCONFIGURED: "wrong configuration"}.get(
        outcome, outcome
    )
    if outcome == CRASHED and step is not None:
        what += " at step {}".format(step)
    if outcome == CRASHED and end.get("phase"):
        what += " ({})".format(end["phase"])
    who = "rank {}".format(end["rank"]) if end.get("rank") is not None else ""
    if who and end.get("node"):
        who += " on {}".format(end["node"])
    return ": ".join(filter(None, [what, who, end.get("error")])) + cause


def _then(end: Dict[str, Any], now: float) -> str:
    then, why = end.get("then"), end.get("why") or ""
    if then == HELD:
        return "held: {}".format(why) if why != end.get("error") else "held"
    if then not in STARTS_AGAIN or not is_crash(end):
        return why
    again = "starts again"
    if end.get("not_before") and end["not_before"] > now and then != BY_SLURM:
        again += " in {}".format(_span(end["not_before"] - now))
    crashes = end.get("crashes", 1)
    return "{}, {} of at most {} without a new checkpoint".format(again, ORDINALS.get(crashes, crashes), CRASHES)


def _without(end: Dict[str, Any]) -> str:
    excluded = end.get("excluded")
    if not excluded or end.get("then") not in STARTS_AGAIN:
        return ""
    return "without {}, if enough others are left".format(", ".join(excluded))


def _span(seconds: float) -> str:
    return "{:.0f} s".format(seconds) if seconds < 90 else "{:.0f} min".format(seconds / 60)
