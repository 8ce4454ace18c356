"""Pure: what an attempt left behind -> how it ended.

An exit code alone proves nothing: a good drain can end in 137 when the batch system cleans up, and a crash beside
drained ranks can look like 75. So a rank that was killed without a word is the cause of whatever its sisters report;
else error files are believed first, then rank 0's outcome, and the codes only say what went wrong when neither exists.
"""

import signal
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from launcher.host.judge.hang import accused
from megatron_rl.contract.codes import EXIT_CONFIG, EXIT_CRASHED, EXIT_DRAINED, EXIT_FINISHED

FINISHED = "finished"
DRAINED = "drained"
CRASHED = "crashed"
MISCONFIGURED = "misconfigured"
LOST = "lost"  # whoever had to record the end was killed, and the ranks have left no word of it

# Signals that end a rank before it can say a word, and that no other rank's failure brings about (SIGABRT may be one:
# communication libraries abort when a peer is gone).
MUTE_ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)

# What a rank dies of, once in a while, that is asked for the stacks of threads which go on meanwhile (seen).
ASKED_FOR_STACKS = signal.SIGSEGV

EXIT_CODES = {
    FINISHED: EXIT_FINISHED,
    DRAINED: EXIT_DRAINED,
    CRASHED: EXIT_CRASHED,
    MISCONFIGURED: EXIT_CONFIG,
}


class Verdict(NamedTuple):
    """How an attempt ended."""

    outcome: str
    step: Optional[int]  # safe on disk (finished, drained), or where it happened
    error: Optional[str]  # one line
    rank: Optional[int]  # whose error it is
    node: Optional[str] = None  # where that rank was
    phase: Optional[str] = None  # what it was doing
    hung: bool = False  # it said nothing any more, and the ranks were ended for it


def judge(
    errors: List[Dict[str, Any]],
    outcome: Optional[Dict[str, Any]],
    exits: Dict[int, int],
    ended_by_us: Optional[str],
    hang: Optional[Dict[str, Any]] = None,
    heartbeats: Sequence[Dict[str, Any]] = (),
) -> Verdict:
    """
    Args:
        errors: the ranks' error files, oldest first: the later ones are usually its consequences.
        outcome: rank 0's outcome file.
        exits: rank -> exit code of those that ended by themselves, in that order; negative: a signal.
        ended_by_us: why the supervisor ended the ranks, where it did.
        hang: hang.json: the rank whose silence the ranks were ended for. What they said of it came afterwards.
        heartbeats: the last ones of the ranks: where those were that could not say a word.
    """
    if hang is not None and outcome is None:
        silent = "silent for {:.0f} s".format(hang["silent_s"])
        return Verdict(CRASHED, hang.get("step"), silent, hang.get("rank"), hang.get("host"), hang.get("phase"), True)
    last = {heartbeat["rank"]: heartbeat for heartbeat in heartbeats}
    reported = {error.get("rank") for error in errors}
    asked = bool(errors and errors[0].get("waited"))  # then every rank was, because one did not come
    for rank, code in exits.items():
        if asked and -code == ASKED_FOR_STACKS:
            continue
        # The sisters of a rank that was killed write errors about lost connections: it is the cause, not they.
        if -code in MUTE_ENDS and rank not in reported and (errors or outcome is None):
            where = last.get(rank, {})
            step = where.get("step", errors[0].get("step") if errors else None)
            return Verdict(CRASHED, step, _unreported(code), rank, where.get("host"), where.get("phase"))
    if errors:
        first = errors[0]
        kind = MISCONFIGURED if first.get("exit_code") == EXIT_CONFIG else CRASHED
        said = str(first.get("error", "no reason given"))
        waited = {error["rank"] for error in errors if error.get("waited")}
        absent = accused(heartbeats, waited) if first.get("waited") else None
        if absent is not None:
            silent = "silent for {:.0f} s while rank {} waited for it: {}".format(absent.silent_s, first["rank"], said)
            return Verdict(CRASHED, absent.step, silent, absent.rank, absent.host, absent.phase, True)
        return Verdict(kind, first.get("step"), said, first.get("rank"), first.get("host"), first.get("phase"))
    if outcome is not None and outcome.get("outcome") in (FINISHED, DRAINED):
        return Verdict(outcome["outcome"], outcome.get("step"), None, None)
    for rank, code in exits.items():
        if code not in (EXIT_FINISHED, EXIT_DRAINED):
            kind = MISCONFIGURED if code == EXIT_CONFIG else CRASHED
            where = last.get(rank, {})
            return Verdict(kind, where.get("step"), _unreported(code), rank, where.get("host"), where.get("phase"))
    if ended_by_us:
        return Verdict(CRASHED, None, "stopped before it had saved: {}".format(ended_by_us), None)
    codes = sorted(set(exits.values()))
    return Verdict(CRASHED, None, "the ranks left (exit code {}) without recording an outcome".format(codes), None)


def _unreported(code: int) -> str:
    return "it {} without an error report".format(in_words(code))


def in_words(code: int) -> str:
    """How a process ended: `left with exit code 3`, `was killed by SIGKILL (often: out of memory)`."""
    if code >= 0:
        return "left with exit code {}".format(code)
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "signal {}".format(-code)
    return "was killed by {}{}".format(name, " (often: out of memory)" if -code == signal.SIGKILL else "")
