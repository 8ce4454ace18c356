"""Pure: accounting of GPU time. Every second of every GPU of a run, over all attempts, is charged to one category.

The time of an attempt begins when its GPUs are held for it and ends when they are released:

    queue      from the submission, or the end of the previous attempt in the same job, to that beginning
    image      until the container image is available
    start-up   node checks and starting processes, until rank 0 accounts for its own time (Attempt.timeline)
    ...        the training ranks' own records. GPUs of the allocation without a rank wait meanwhile. With inference
               replicas the training ranks wait for the answers, and the replicas wait the rest of the time
    drain      leaving: from the request, or from rank 0's last line if it left cleanly, to the end
    lost       time whose results were discarded: steps after the checkpoint from which a later attempt resumed, the
               unfinished step at the end of an attempt (its answers are banked, its training is not), and unrecorded
               time, for example before rank 0 was killed

The pause between two jobs, or between two starts on one machine, is not charged. Clocks of hosts may differ by seconds:
times are sorted, so that no span is negative and the sums hold.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from megatron_rl.contract.attempt_records import AttemptEnd, AttemptStart, LedgerLine, TimelineLine
from megatron_rl.contract.codes import FINISHED, STOPPED
from megatron_rl.contract.time_total import of_one_rank

QUEUE, IMAGE, START_UP, WAIT, LOST, DRAIN = "queue", "image", "start-up", "wait", "lost", "drain"
GENERATE = "generate"
USEFUL = (GENERATE, "reward", "log-probs", "train", "refit", "evaluate")
CATEGORIES = (QUEUE, IMAGE, START_UP, "load", *USEFUL, "offload", "save", WAIT, LOST, DRAIN)

TRAINING = ("log-probs", "train", "offload", "refit")  # repeated for a step that was not finished
WORK = (GENERATE, "reward", WAIT, *TRAINING)  # work for a step; other categories belong to the previous step

IN_QUEUE = 0  # number of the attempt that a job in the queue will begin


class AttemptTrace(NamedTuple):
    """Times in the files of one attempt, in unix time; None: not recorded."""

    timeline: Sequence[TimelineLine] = ()
    """Its lines; those between the first ones and a line that `covers` them may be left out."""
    image: float | None = None  # its image was available
    ready: float | None = None  # its nodes had been chosen, and the ranks were about to start
    asked: float | None = None  # it was asked to leave
    left: bool = False  # whether rank 0 recorded an outcome
    seen: float | None = None  # last sign of life of rank 0


class AttemptUsage(NamedTuple):
    attempt: int | None  # None: its job is still in the queue
    gpus: int
    queued_at: float
    start: float
    end: float  # end of the charged time: of a running attempt, the last line of its timeline
    seconds: dict[str, float]  # GPU-seconds of each of CATEGORIES; without queue they sum to gpus * (end - start)


class GpuUsage(NamedTuple):
    attempts: list[AttemptUsage]

    @property
    def total(self) -> dict[str, float]:
        return {name: sum(attempt.seconds[name] for attempt in self.attempts) for name in CATEGORIES}

    def as_json(self) -> dict[str, Any]:
        """JSON object of the usage. Shares are of the GPU-seconds held, without `queue`; null where none were held."""
        total = self.total
        held = held_of(total)
        return {
            "goodput": goodput_of(total),
            "goodput_with_queue": sum(total[name] for name in USEFUL) / (held + total[QUEUE]) if held else None,
            "held_gpu_seconds": held,
            "gpu_seconds": total,
            "shares": {name: total[name] / held for name in CATEGORIES if name != QUEUE} if held else None,
            "attempts": [
                {
                    "attempt": attempt.attempt,
                    "gpus": attempt.gpus,
                    "queued_at": attempt.queued_at,
                    "start": attempt.start,
                    "end": attempt.end,
                    "gpu_seconds": attempt.seconds,
                }
                for attempt in self.attempts
            ],
        }


def held_of(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values()) - seconds[QUEUE]


def goodput_of(seconds: Mapping[str, float]) -> float | None:
    held = held_of(seconds)
    return sum(seconds[name] for name in USEFUL) / held if held else None


def gpu_usage(
    ledger: Sequence[LedgerLine],
    traces: Mapping[int, AttemptTrace],
    now: float,
    running: bool = False,
    queued: AttemptStart | None = None,
) -> GpuUsage:
    """Charge all time of a run. An attempt without an end in the ledger was killed, unless it is `running`; `queued` is
    the coming start of a job in the queue (`in_queue`), as if it happened now."""
    starts = [line for line in ledger if isinstance(line, AttemptStart)] + ([queued] if queued else [])
    ends = {line.attempt: line for line in ledger if isinstance(line, AttemptEnd)}
    traced = [traces.get(start.attempt, AttemptTrace()) for start in starts]
    kept = [*accumulate(reversed(traced[1:]), kept_before, initial=sys.maxsize)][::-1]
    usages: list[AttemptUsage] = []
    for place, (line, trace) in enumerate(zip(starts, traced)):
        last = place + 1 == len(starts)
        end = ends.get(line.attempt)
        goes_on = running and last and end is None
        before = starts[place - 1] if place else None
        stopped = before is not None and before.attempt in ends and ends[before.attempt].outcome in (STOPPED, FINISHED)
        floor = usages[-1].end if usages else float("-inf")
        start = max(floor, _held_from(line, before, stopped, floor))
        queued_at = min(start, max(floor, _queued_from(line, before, stopped, floor)))
        closed = max(start, _end(line, end, trace, now if last else starts[place + 1].at, goes_on))
        gpus = line.gpus or line.ranks or _ranks(trace) or 0
        account = _Account(gpus, start, closed, line.generating)
        account.seconds[QUEUE] = gpus * (start - queued_at)
        _charge_attempt(account, trace, kept[place], goes_on)
        number = None if line.attempt == IN_QUEUE else line.attempt
        usages.append(AttemptUsage(number, gpus, queued_at, start, closed, account.seconds))
    return GpuUsage(usages)


def kept_before(kept: int, trace: AttemptTrace) -> int:
    """Return the newest step of the attempt before the one of `trace` whose work was kept, given that of the latter: a
    later attempt repeats the work after the step that it resumed from."""
    resumed = _resumed(trace)
    return kept if resumed is None else min(kept, resumed)


def covers(line: TimelineLine, kept: int) -> bool:
    """Whether a line has the total of all lines up to it, and none of their work was lost."""
    return line.total is not None and line.step < kept


def in_queue(job_id: str, submitted_at: float, gpus: int, now: float) -> AttemptStart:
    """The attempt that a job in the queue will begin, as if it began now and took no time."""
    return AttemptStart(IN_QUEUE, now, job_id=job_id, restart=-1, gpus=gpus, submitted_at=submitted_at)


class _Account:
    """Time of one attempt from start to end, charged without gaps."""

    def __init__(self, gpus: int, start: float, end: float, generating: int = 0) -> None:
        self.gpus, self.at, self.end = gpus, start, end
        self.generating = generating  # number of the GPUs that only generate
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)

    def until(self, at: float, category: str) -> None:
        apart = min(self.generating, self.gpus)
        span = self._pass(at)
        self._add({category: span * (self.gpus - apart)}, {category: span * apart})

    def line(self, line: TimelineLine, ranks: int, fate: Mapping[str, str]) -> None:
        """Charge a line of the timeline. `fate` maps a category to the one that gets its seconds instead."""
        span = self._pass(line.at)
        passed, known = of_one_rank(line.seconds, span, ranks)
        self._charge(passed, known, span - known, ranks, fate)

    def lines_up_to(self, line: TimelineLine, began: float, ranks: int) -> None:
        """Charge a line of the timeline that has a total, and all lines before it, which began at `began`."""
        assert line.total is not None
        seconds, known, unknown = line.total
        whole = self.at == began and line.at <= self.end
        span = self._pass(line.at)
        # Where clocks of hosts differ, the attempt began later or ended earlier than its lines say: each entry shrinks.
        share = 1.0 if whole or not known + unknown else min(1.0, span / (known + unknown))
        passed = {name: its * share for name, its in seconds.items()}
        self._charge(passed, known * share, unknown * share if whole else span - known * share, ranks, {})

    def _charge(
        self, passed: Mapping[str, float], known: float, unknown: float, ranks: int, fate: Mapping[str, str]
    ) -> None:
        """Charge seconds of each rank: `passed` by category, `known` in all, and `unknown` ones."""
        # Time on the clock that no line accounts for is lost: a line is missing. With further GPUs that only generate,
        # the ranks' seconds of generate are wait for the ranks and generate for those GPUs, and all their other seconds
        # are wait for those GPUs. GPUs without a process always wait.
        busy = min(ranks, self.gpus)
        apart = min(self.generating, self.gpus - busy)
        seconds: dict[str, float] = defaultdict(float)
        generating: dict[str, float] = defaultdict(float)
        seconds[fate.get(WAIT, WAIT)] += (self.gpus - busy - apart) * known
        for name, its in passed.items():
            name = name if name in self.seconds else WAIT  # a newer version has more categories
            mine, theirs = (WAIT, GENERATE) if apart and name == GENERATE else (name, WAIT)
            seconds[fate.get(mine, mine)] += its * busy
            generating[fate.get(theirs, theirs)] += its * apart
        seconds[LOST] += (self.gpus - apart) * unknown
        generating[LOST] += apart * unknown
        self._add(seconds, generating)

    def _add(self, *parts: Mapping[str, float]) -> None:
        for part in parts:
            for name, its in part.items():
                self.seconds[name] += its

    def _pass(self, at: float) -> float:
        at = min(max(at, self.at), self.end)
        passed, self.at = at - self.at, at
        return passed


def _charge_attempt(account: _Account, trace: AttemptTrace, kept: int, goes_on: bool) -> None:
    """Charge the time of an attempt. `kept` is the newest step from which a later attempt resumed."""
    ranks = _ranks(trace) or account.gpus
    began = _began(trace)
    if trace.image is not None:
        account.until(trace.image if began is None else min(trace.image, began), IMAGE)
    started = trace.ready if began is None else began
    if started is not None:
        account.until(started, START_UP)
    reached = _resumed(trace)
    lines = trace.timeline
    covered = next((place for place in reversed(range(len(lines))) if covers(lines[place], kept)), None)
    if covered is not None and began is not None:
        account.lines_up_to(lines[covered], began, ranks)
        reached, lines = lines[covered].step, lines[covered + 1 :]
    for line in lines:
        account.line(line, ranks, dict.fromkeys(_repeated(line.step, reached, kept), LOST))
        reached = line.step
    if goes_on:
        account.until(account.end, START_UP)
    elif not (trace.left and trace.timeline):
        account.until(account.end if trace.asked is None else trace.asked, LOST)
    account.until(account.end, DRAIN)


def _repeated(step: int, before: int | None, kept: int) -> Sequence[str]:
    """Categories of a line of the timeline whose work was lost, by its step and that of the previous line. Where the
    step rises, the line ends that step; where it does not, the line holds work for the next one."""
    if before is not None and before > kept:
        return CATEGORIES
    if step > kept:
        return WORK
    return TRAINING if step == before == kept else ()


def _held_from(line: AttemptStart, before: AttemptStart | None, stopped: bool, ended: float) -> float:
    """Unix time from which the GPUs of an attempt were held for it. `stopped`: whether the previous attempt, which
    ended at `ended`, was to be the last."""
    if before is not None and _same_job(line, before):
        if stopped:
            return line.at  # the pause in an allocation of the user's own is not charged
        if line.restart == before.restart:
            return ended  # the GPUs were never released
    return line.at if line.held_since is None else min(line.at, line.held_since)


def _queued_from(line: AttemptStart, before: AttemptStart | None, stopped: bool, ended: float) -> float:
    if before is not None and _same_job(line, before):
        return line.at if stopped else ended
    return line.at if line.submitted_at is None else line.submitted_at


def _same_job(line: AttemptStart, before: AttemptStart) -> bool:
    return line.job_id is not None and line.job_id == before.job_id


def _end(start: AttemptStart, end: AttemptEnd | None, trace: AttemptTrace, next_start: float, goes_on: bool) -> float:
    if goes_on:
        return trace.timeline[-1].at if trace.timeline else next_start
    if end is not None and is_own(end):
        return end.at
    known = [line.at for line in trace.timeline[-1:]] + [trace.image, trace.ready, trace.seen]
    return min(next_start, max([start.at] + [at for at in known if at is not None]))


def is_own(end: AttemptEnd) -> bool:
    return end.seconds is not None


def _began(trace: AttemptTrace) -> float | None:
    if not trace.timeline:
        return None
    first = trace.timeline[0]
    if first.began is not None:
        return first.began
    return first.at - sum(first.seconds.values()) / (_ranks(trace) or 1)


def _ranks(trace: AttemptTrace) -> int | None:
    return next((line.ranks for line in trace.timeline if line.ranks), None)


def _resumed(trace: AttemptTrace) -> int | None:
    return next((line.resumed for line in trace.timeline if line.resumed is not None), None)
