"""Where every second of every GPU of a run went, over all its attempts: each is booked exactly once.

`book` is pure; `read` brings what the files of a run say, and `write` leaves the table in RunDir.goodput. The time of
an attempt begins when its GPUs are held for it and ends when they are given back:

    queue      from the submission, or the end of the attempt before it in the same job, to that beginning
    image      until the container image is there
    start-up   checks of the nodes, and processes that start, until rank 0 books its own time (Attempt.timeline)
    ...        what the ranks booked; GPUs without a rank wait meanwhile
    drain      leaving: from the request, or from rank 0's last line if it left in order, to the end
    lost       what nothing has come of: steps after the checkpoint that a later attempt went on from, the step that was
               under way when an attempt ended (its answers are banked, its training is not), and time of which there
               is no record: a killed rank 0 cannot say what it had been doing

The pause between two jobs, and between two starts on one machine, is nobody's. The hosts' clocks may differ by seconds:
times are brought into order, so that nothing is negative and the sums hold.
"""

import sys
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from launcher.host.judge.policy import STOPPED
from launcher.host.judge.verdict import FINISHED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import read_json, read_json_lines, write_json

QUEUE, IMAGE, START_UP, WAIT, LOST, DRAIN = "queue", "image", "start-up", "wait", "lost", "drain"
USEFUL = ("generate", "reward", "log-probs", "train", "refit", "evaluate")
"""Goodput is the share of these."""
CATEGORIES = (QUEUE, IMAGE, START_UP, "load") + USEFUL + ("save", WAIT, LOST, DRAIN)

TRAINING = ("log-probs", "train", "refit")  # of a step that is not finished these have to be repeated
WORK = ("generate", "reward", WAIT) + TRAINING  # for a step; all else comes before it and belongs to the step before

Line = Mapping[str, Any]


class Trace(NamedTuple):
    """What the files of one attempt tell. Unix times, None where there is none."""

    timeline: Sequence[Line] = ()
    image: Optional[float] = None  # when its image was there
    ready: Optional[float] = None  # when its nodes had been chosen, and the ranks were about to start
    asked: Optional[float] = None  # when it was asked to leave
    left: bool = False  # rank 0 recorded an outcome
    seen: Optional[float] = None  # the last sign of life of rank 0


class Row(NamedTuple):
    """One attempt."""

    attempt: Optional[int]  # None: the one that is waited for
    gpus: int
    queued_at: float
    start: float
    end: float  # of what is booked: for an attempt that runs, the last line of its timeline
    seconds: Dict[str, float]  # GPU-seconds of each of CATEGORIES; without queue they sum to gpus * (end - start)


class Table(NamedTuple):
    rows: List[Row]

    @property
    def total(self) -> Dict[str, float]:
        """GPU-seconds of each of CATEGORIES."""
        return {name: sum(row.seconds[name] for row in self.rows) for name in CATEGORIES}

    def as_json(self) -> Dict[str, Any]:
        """All of it. Shares are of the GPU-seconds held, null where none was; `queue` is no part of those."""
        total = self.total
        held = sum(total.values()) - total[QUEUE]
        useful = sum(total[name] for name in USEFUL)
        return {
            "goodput": useful / held if held else None,
            "goodput_with_queue": useful / (held + total[QUEUE]) if held else None,
            "held_gpu_seconds": held,
            "gpu_seconds": total,
            "shares": {name: total[name] / held for name in CATEGORIES if name != QUEUE} if held else None,
            "attempts": [
                {
                    "attempt": row.attempt,
                    "gpus": row.gpus,
                    "queued_at": row.queued_at,
                    "start": row.start,
                    "end": row.end,
                    "gpu_seconds": row.seconds,
                }
                for row in self.rows
            ],
        }


def book(
    ledger: Sequence[Line],
    traces: Mapping[int, Trace],
    now: float,
    running: bool = False,
    waiting: Optional[Line] = None,
) -> Table:
    """
    Args:
        ledger: lines of attempts.jsonl.
        traces: attempt -> what its files tell.
        running: whether an attempt without an end in the ledger goes on; else it was killed.
        waiting: {job_id, submitted_at, gpus} of the job if it is in the queue now.
    """
    starts = [line for line in ledger if line["event"] == "start"]
    if waiting is not None:  # as if it began now, for no time at all
        starts.append(dict(waiting, attempt=None, at=now, restart=-1))
    ends = {line["attempt"]: line for line in ledger if line["event"] == "end"}
    traced = [traces.get(line["attempt"], Trace()) for line in starts]
    rows = []  # type: List[Row]
    for place, (line, trace) in enumerate(zip(starts, traced)):
        last = place + 1 == len(starts)
        end = ends.get(line["attempt"])
        goes_on = running and last and end is None
        before = starts[place - 1] if place else {}
        stopped = ends.get(before.get("attempt"), {}).get("outcome") in (STOPPED, FINISHED)
        floor = rows[-1].end if rows else float("-inf")
        start = max(floor, _held_from(line, before, stopped, floor))
        queued_at = min(start, max(floor, _queued_from(line, before, stopped, floor)))
        closed = max(start, _end(line, end, trace, now if last else starts[place + 1]["at"], goes_on))
        gpus = line.get("gpus") or line.get("ranks") or _ranks(trace) or 0
        account = _Account(gpus, start, closed)
        account.seconds[QUEUE] = gpus * (start - queued_at)
        later = [step for step in map(_resumed, traced[place + 1 :]) if step is not None]
        _book_attempt(account, trace, min(later) if later else sys.maxsize, goes_on)
        rows.append(Row(line["attempt"], gpus, queued_at, start, closed, account.seconds))
    return Table(rows)


class _Account:
    """Books the time of one attempt from its start to its end, without gaps."""

    def __init__(self, gpus: int, start: float, end: float) -> None:
        self.gpus, self.at, self.end = gpus, start, end
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)

    def until(self, at: float, category: str) -> None:
        self.seconds[category] += self.gpus * self._pass(at)

    def line(self, line: Line, ranks: int, fate: Mapping[str, str]) -> None:
        """Book a line of the timeline.

        Args:
            fate: category -> where its seconds go instead.
        """
        span = self._pass(line["at"])
        told = sum(line["seconds"].values()) / ranks
        known = min(span, told)
        busy = min(ranks, self.gpus)
        for name, seconds in line["seconds"].items():
            name = name if name in self.seconds else WAIT  # of a newer version
            self.seconds[fate.get(name, name)] += seconds / ranks * busy * (known / told) if told else 0.0
        self.seconds[fate.get(WAIT, WAIT)] += (self.gpus - busy) * known
        self.seconds[LOST] += self.gpus * (span - known)  # a line is missing

    def _pass(self, at: float) -> float:
        """Seconds until `at`, which are then over."""
        at = min(max(at, self.at), self.end)
        passed, self.at = at - self.at, at
        return passed


def _book_attempt(account: _Account, trace: Trace, kept: int, goes_on: bool) -> None:
    """
    Args:
        kept: the newest step whose work later attempts went on from.
    """
    ranks = _ranks(trace) or account.gpus
    began = _began(trace)
    if trace.image is not None:
        account.until(trace.image if began is None else min(trace.image, began), IMAGE)
    started = trace.ready if began is None else began
    if started is not None:
        account.until(started, START_UP)
    reached = _resumed(trace)
    for line in trace.timeline:
        account.line(line, ranks, dict.fromkeys(_repeated(line["step"], reached, kept), LOST))
        reached = line["step"]
    if goes_on:
        account.until(account.end, START_UP)
    elif not (trace.left and trace.timeline):
        account.until(account.end if trace.asked is None else trace.asked, LOST)
    account.until(account.end, DRAIN)


def _repeated(step: int, before: Optional[int], kept: int) -> Sequence[str]:
    """What is lost of a line of the timeline.

    Args:
        step, before: of this line and of the one before it. Where the step rises, the line ends that step; where it
            does not, the line holds work for the next one.
    """
    if before is not None and before > kept:
        return CATEGORIES
    if step > kept:
        return WORK
    return TRAINING if step == before == kept else ()


def _held_from(line: Line, before: Line, stopped: bool, ended: float) -> float:
    """When the GPUs of an attempt were there for it.

    Args:
        line, before: its start and that of the attempt before it in the ledger; empty: there was none.
        stopped: whether nothing was to follow that one.
        ended: when it ended.
    """
    if _same_job(line, before):
        if stopped:
            return line["at"]  # somebody's own allocation: the pause was his
        if line.get("restart") == before.get("restart"):
            return ended  # they were never given back
    return min(line["at"], line.get("held_since", line["at"]))


def _queued_from(line: Line, before: Line, stopped: bool, ended: float) -> float:
    """When an attempt began to wait for GPUs."""
    if _same_job(line, before):
        return line["at"] if stopped else ended
    return line.get("submitted_at", line["at"])


def _same_job(line: Line, before: Line) -> bool:
    return line.get("job_id") is not None and line["job_id"] == before.get("job_id")


def _end(start: Line, end: Optional[Line], trace: Trace, next_start: float, goes_on: bool) -> float:
    if goes_on:
        return trace.timeline[-1]["at"] if trace.timeline else next_start
    if end is not None and _its_own(end):
        return end["at"]
    told = [line["at"] for line in trace.timeline[-1:]] + [trace.image, trace.ready, trace.seen]
    return min(next_start, max([start["at"]] + [at for at in told if at is not None]))


def _its_own(end: Line) -> bool:
    """Whether whoever ran the attempt recorded its end; else whoever came next did, perhaps days later."""
    return "seconds" in end


def _began(trace: Trace) -> Optional[float]:
    if not trace.timeline:
        return None
    first = trace.timeline[0]
    return first.get("began", first["at"] - sum(first["seconds"].values()) / (_ranks(trace) or 1))


def _ranks(trace: Trace) -> Optional[int]:
    return next((line["ranks"] for line in trace.timeline if line.get("ranks")), None)


def _resumed(trace: Trace) -> Optional[int]:
    """The step of the checkpoint that an attempt went on from; None where it never got that far."""
    return next((line["resumed"] for line in trace.timeline if line.get("resumed") is not None), None)


def read(run: RunDir, now: float, running: bool = False, queued: bool = False) -> Table:
    """The table of a run as it stands.

    Args:
        running, queued: whether its newest attempt goes on, and whether its job waits in the queue.
    """
    ledger = read_json_lines(run.attempts_ledger)
    ended = {line["attempt"] for line in ledger if line["event"] == "end" and _its_own(line)}
    traces = {line["attempt"]: _trace(run.attempt(line["attempt"]), line["attempt"] in ended) for line in ledger}
    job = (read_json(run.job) if queued else None) or {}
    plan = read_json(run.plan) or {}
    waiting = {"job_id": job["job_id"], "submitted_at": job["submitted_at"], "gpus": gpus_asked(plan)} if job else None
    return book(ledger, traces, now, running, waiting)


def write(run: RunDir, now: float) -> None:
    """Put the table into the record, anew at each attempt's end. A full disk is no reason not to end."""
    try:
        write_json(run.goodput, read(run, now).as_json())
    except OSError as error:
        print("{}: {}; mrl status computes it".format(run.goodput, error.strerror), file=sys.stderr)


def mark(attempt: Attempt, what: str, at: float) -> None:
    """Note that an attempt has got as far as `image` or `ready`."""
    write_json(attempt.marks, dict(read_json(attempt.marks) or {}, **{what: at}))


def gpus_asked(plan: Mapping[str, Any]) -> int:
    """GPUs that a job asks for, the spare nodes' included."""
    return int((plan.get("nodes", 0) + plan.get("spare_nodes", 0)) * plan.get("gpus_per_node", 0))


def _trace(attempt: Attempt, ended: bool) -> Trace:
    lines = [line for line in read_json_lines(attempt.timeline) if isinstance(line, dict)]
    marks = read_json(attempt.marks) or {}
    beat = (None if ended else read_json(attempt.heartbeat(0))) or {}
    return Trace(
        timeline=[line for line in lines if {"at", "step", "seconds"} <= set(line)],
        image=marks.get("image"),
        ready=marks.get("ready"),
        asked=(read_json(attempt.drain) or {}).get("at"),
        left=attempt.outcome.exists(),
        seen=beat.get("written"),
    )
