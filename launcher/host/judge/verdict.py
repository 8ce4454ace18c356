"""Pure: evidence about an attempt -> how it ended.

An exit code alone proves nothing: a good drain can end in 137 when the batch system cleans up, and a crash beside
drained ranks can look like 75. So a rank that was killed without an error file, or first by NCCL's watchdog, is the
cause of the errors that other ranks report. So is one that failed and could write none, where they report a lost rank.
Otherwise error files count first, then rank 0's outcome, and exit codes only where there is neither.
"""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

from launcher.host.judge.causes import is_unexplained
from launcher.host.judge.hang import absent_rank
from megatron_rl.contract.attempt_records import Drain, Hang, Heartbeat, Outcome, RankError
from megatron_rl.contract.codes import CRASHED, DRAINED, EXIT_CONFIG, EXIT_DRAINED, EXIT_FINISHED, LOST, MISCONFIGURED

# Signals that end a rank before it can write an error file, and that are never a consequence of another rank's failure.
# (SIGABRT may be one: communication libraries abort when a peer dies.)
MUTE_ENDS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)

# Signal that sometimes ends a rank which dumps its stacks while its threads continue (seen).
ASKED_FOR_STACKS = signal.SIGSEGV

NODES_DISK = "on its node's own disk: "  # prefix of an error of a full local disk
NOT_STARTED = "it could not be started: "  # prefix of the reason why a rank's program never began

# Errors of the shell that becomes the rank, or of its Python; our own code is on the shared file system.
_NOT_IN_IMAGE = re.compile(
    r"exec: [^/\s]+: not found$|ModuleNotFoundError: No module named '(?!(?:megatron_rl|launcher)\b)"
)

# Errors that another rank's end causes
_LOST_PEER = re.compile(r"^PeerLost: |[Cc]onnection (?:closed|reset|refused)|[Bb]roken pipe")


class RankExit(NamedTuple):
    rank: int
    code: int  # negative: the signal that ended it
    host: str | None = None  # None: unknown

    @property
    def bad(self) -> bool:
        return self.code not in (EXIT_FINISHED, EXIT_DRAINED)


class AttemptEvidence(NamedTuple):
    # Written by the ranks
    errors: list[RankError] = []  # oldest first; later ones are usually its consequences
    unreadable_errors: dict[int, str] = {}  # rank -> why its error file cannot be read
    outcome: Outcome | None = None
    unreadable_outcome: str | None = None  # why the outcome, which rank 0 wrote, cannot be read
    heartbeats: list[Heartbeat] = []  # the last of each rank
    stacks: dict[int, str] = {}  # rank -> path of its stack dump, for the user
    last_lines: dict[int, str] = {}  # failed rank -> last line of its log
    not_started: dict[int, str] = {}  # failed rank -> why its program never began
    timed_out: dict[int, str] = {}  # rank -> its collective that timed out, by NCCL's watchdog

    trained: int | None = None  # newest step in rank 0's timeline of this attempt; None: it has none

    # Written or seen by the host side
    unwritable: str | None = None  # why the run directory cannot be written, where ranks failed without an error file
    drain: Drain | None = None
    hang: Hang | None = None
    exits: list[RankExit] = []  # in their order, without those that the host side caused
    code: int | None = None  # exit code of the training step; negative: a signal; None: it never began
    last_words: str = ""  # last line of srun about the step
    unready: str | None = None  # why it never began
    unready_host: str | None = None  # the node to blame for that, where only one was tried
    late: str | None = None  # reason of the deadline at which ranks were ended before they had saved
    in_container: bool = False
    unseen: str | None = None  # error to report where nobody saw the end; None: the host side saw it


class Verdict(NamedTuple):
    outcome: str  # one of codes
    step: int | None = None  # saved step (finished, drained), or the step of the error
    error: str | None = None  # one line
    rank: int | None = None  # rank of the error
    node: str | None = None  # its node
    phase: str | None = None  # its phase
    hung: bool = False  # whether it was silent, and the ranks were ended for that
    why: str = ""  # why it finished before its last step


def verdict_of(evidence: AttemptEvidence) -> Verdict:
    # The order is what makes the verdict. Suppose the kernel kills rank 5 for its memory: rank 5 leaves only an exit by
    # SIGKILL, while ranks 0 to 4 write error files about a lost connection a second later, and the ranks of other nodes
    # leave with 75, since srun's SIGTERM looked like a request to save. By error files alone rank 0 would be to blame,
    # by exit codes alone the attempt would count as drained. Asked first for a rank that was killed without a word, the
    # evidence names rank 5 and its node, which is what decides whether the job avoids that node.
    return (
        _hung(evidence)
        or _killed_silently(evidence)
        or _timed_out(evidence)
        or _failed_unreported(evidence)
        or _reported(evidence)
        or _died_before_drain(evidence)
        or _left_cleanly(evidence)
        or _died(evidence)
        or _unrecorded(evidence)
    )


def _hung(evidence: AttemptEvidence) -> Verdict | None:
    hang = evidence.hang
    if hang is None or evidence.outcome is not None:
        return None
    return _by_hang(evidence, hang)


def _killed_silently(evidence: AttemptEvidence) -> Verdict | None:
    """A rank was killed without an error file: it is the cause, and other ranks' errors about connections are not."""
    if not evidence.errors and evidence.outcome is not None:
        return None
    reported = {error.rank for error in evidence.errors}
    asked = bool(evidence.errors and evidence.errors[0].waited)  # a collective timed out, so all ranks dumped stacks
    for ended in evidence.exits:
        if asked and -ended.code == ASKED_FOR_STACKS:
            continue
        if -ended.code in MUTE_ENDS and ended.rank not in reported:
            verdict = _by_exit(evidence, ended)
            known = evidence.errors[0].step if evidence.errors else None
            return verdict if verdict.step is not None else verdict._replace(step=known)
    return None


def _timed_out(evidence: AttemptEvidence) -> Verdict | None:
    """NCCL's watchdog ended the first rank, which leaves no error file, and other ranks report lost connections. Where
    no rank stands out as the absent one, no node is to blame."""
    first = next((ended for ended in evidence.exits if ended.bad), None)
    if first is None or first.rank not in evidence.timed_out or evidence.outcome is not None:
        return None
    if first.rank in {error.rank for error in evidence.errors}:
        return None
    collective = f"a collective timed out: {evidence.timed_out[first.rank]}"
    absent = _waited_for(evidence, first)
    if absent is not None:
        return absent._replace(error=f"{absent.error}: {collective}")
    return _by_exit(evidence, first)._replace(error=collective, node=None)


def _failed_unreported(evidence: AttemptEvidence) -> Verdict | None:
    """A rank failed and could write no report, because the disk was full or its quota used up. The others report that
    they lost it."""
    if not evidence.errors or _LOST_PEER.search(evidence.errors[0].error) is None:
        return None
    reported = {*evidence.unreadable_errors, *(error.rank for error in evidence.errors)}
    for ended in evidence.exits:
        # Of thousands of ranks that failed, only the reports of some were read: those with a last line.
        if ended.code > 0 and ended.rank in evidence.last_lines and ended.rank not in reported:
            return _by_exit(evidence, ended)
    return None


def _reported(evidence: AttemptEvidence) -> Verdict | None:
    if evidence.errors:
        first = evidence.errors[0]
        waited = {error.rank for error in evidence.errors if error.waited}
        absent = absent_rank(evidence.heartbeats, waited) if first.waited else None
        if absent is not None:
            return _by_hang(evidence, absent, f" while rank {first.rank} waited for it: {first.error}")
        kind = _kind(evidence, first.exit_code, first.error)
        return Verdict(kind, first.step, first.error, first.rank, first.host, first.phase)
    for rank, why in sorted(evidence.unreadable_errors.items()):
        beat = _beat(evidence, rank)
        where = Verdict(CRASHED, None, f"its error report cannot be read: {why}", rank)
        return where._replace(step=beat.step, node=beat.host, phase=beat.phase or None) if beat else where
    return None


def _died_before_drain(evidence: AttemptEvidence) -> Verdict | None:
    """A rank failed, and srun's --kill-on-bad-exit sent SIGTERM to the others, which treated it as a request to leave:
    they saved nothing, and no other source knows of a request."""
    outcome = evidence.outcome
    saved = outcome is not None and (outcome.outcome != DRAINED or outcome.step is not None)
    first = evidence.exits[0] if evidence.exits else None
    if saved or first is None or not first.bad or evidence.drain is None or not is_unexplained(evidence.drain):
        return None
    return _by_exit(evidence, first)


def _left_cleanly(evidence: AttemptEvidence) -> Verdict | None:
    if evidence.outcome is not None:
        return Verdict(evidence.outcome.outcome, evidence.outcome.step, why=evidence.outcome.why)
    if evidence.unreadable_outcome is not None:  # only ranks that left cleanly record one
        return Verdict(DRAINED, None, f"what rank 0 recorded cannot be read: {evidence.unreadable_outcome}")
    return None


def _died(evidence: AttemptEvidence) -> Verdict | None:
    bad = [ended for ended in evidence.exits if ended.bad]
    return (_waited_for(evidence, bad[0]) or _by_exit(evidence, bad[0])) if bad else None


def _waited_for(evidence: AttemptEvidence, ended: RankExit) -> Verdict | None:
    """NCCL's watchdog aborted a rank whose collective timed out, so it wrote no error file. Heartbeats show the rank
    that it waited for."""
    if -ended.code != signal.SIGABRT:
        return None
    aborted = {each.rank for each in evidence.exits if -each.code == signal.SIGABRT}
    absent = absent_rank(evidence.heartbeats, aborted | set(evidence.timed_out))
    consequence = f" before rank {ended.rank} {describe_exit(ended.code)}"
    return _by_hang(evidence, absent, consequence) if absent is not None else None


def _unrecorded(evidence: AttemptEvidence) -> Verdict:
    if evidence.unseen is not None:
        return Verdict(LOST, None, evidence.unseen)
    if evidence.late is not None:
        return Verdict(CRASHED, None, f"stopped before it had saved: {evidence.late}")
    if evidence.drain is not None and (evidence.code is None or evidence.code < 0):
        return Verdict(DRAINED)  # asked to leave before there was anything to save
    if evidence.code is None and not evidence.exits:
        why = evidence.unready or "the steps could not be started"
        return Verdict(CRASHED, None, why, node=evidence.unready_host)
    if evidence.exits:
        codes = sorted({ended.code for ended in evidence.exits})
        return Verdict(CRASHED, None, f"the ranks left (exit code {codes}) without recording an outcome")
    error = f"the step {describe_exit(evidence.code or 0)} and recorded no outcome"
    error += f"; srun: {evidence.last_words}" if evidence.last_words else ""
    return Verdict(CRASHED, None, error)


def _by_exit(evidence: AttemptEvidence, ended: RankExit) -> Verdict:
    why = evidence.not_started.get(ended.rank)
    if why is not None:
        return _not_started(evidence, ended, why)
    kind = _kind(evidence, ended.code, evidence.last_lines.get(ended.rank, ""))
    error = f"it {describe_exit(ended.code)} without an error report"
    line = evidence.last_lines.get(ended.rank)  # the only trace of, for example, a failed import
    error += f"; its log ends: {line}" if line else ""
    if evidence.unwritable is not None:  # its log was cut short too
        error = f"{evidence.unwritable}; it {describe_exit(ended.code)} without a report"
    beat = _beat(evidence, ended.rank)
    host = ended.host or (beat.host if beat else None)
    return Verdict(kind, beat.step if beat else None, error, ended.rank, host, (beat.phase or None) if beat else None)


def _not_started(evidence: AttemptEvidence, ended: RankExit, why: str) -> Verdict:
    """Verdict on a rank whose program never began. Where another node has the same error, neither is to blame."""
    kind = _kind(evidence, ended.code, evidence.last_lines.get(ended.rank, ""))
    alike = [other for other in evidence.exits if evidence.not_started.get(other.rank) == why]
    node = None if any(other.host != ended.host for other in alike) else ended.host
    return Verdict(kind, None, NOT_STARTED + why, ended.rank, node)


def _kind(evidence: AttemptEvidence, code: int, text: str) -> str:
    """MISCONFIGURED where the rank says so, or where the image, which is the same on every node, lacks a program or
    library. Outside a container a missing library may mean a missing file system: CRASHED."""
    lacking = evidence.in_container and _NOT_IN_IMAGE.search(text) is not None
    return MISCONFIGURED if code == EXIT_CONFIG or lacking else CRASHED


def _beat(evidence: AttemptEvidence, rank: int) -> Heartbeat | None:
    """Last heartbeat of a rank. Where rank 0's timeline is at a later step it is moved there, with an unknown phase."""
    beat = next((beat for beat in evidence.heartbeats if beat.rank == rank), None)
    if beat is None or evidence.trained is None or beat.step > evidence.trained:
        return beat
    return beat._replace(step=evidence.trained + 1, phase="")


def _by_hang(evidence: AttemptEvidence, hang: Hang, consequence: str = "") -> Verdict:
    stacks = f" (stacks: {evidence.stacks[hang.rank]})" if hang.rank in evidence.stacks else ""
    error = f"silent for {hang.silent_s:.0f} s{consequence}{stacks}"
    return Verdict(CRASHED, hang.step, error, hang.rank, hang.host, hang.phase, hung=True)


def describe_exit(code: int) -> str:
    """`left with exit code 3`, or `was killed by SIGKILL (often: out of memory)`."""
    if code >= 0:
        return f"left with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (often: out of memory)' if -code == signal.SIGKILL else ''}"
