"""attempts.jsonl: one line per start and end of an attempt."""

import socket
from typing import Any, Dict

from launcher.host.verdict import LOST, Verdict
from megatron_rl.run_dir import Attempt, RunDir, append_json_line, read_json, read_json_lines


def record(run: RunDir, attempt: int, event: str, at: float, **facts: Any) -> None:
    line = {"attempt": attempt, "event": event, "at": at, "host": socket.gethostname()}
    line.update(facts)
    append_json_line(run.attempts_ledger, line)


def end(run: RunDir, attempt: int, at: float, verdict: Verdict, **facts: Any) -> None:
    """The line of an attempt's end. `facts` come on top of the verdict, and count for more.

    `checkpoint` is the newest step that had a checkpoint then: whether an attempt got on shows in the lines alone.
    """
    line: Dict[str, Any] = {
        "outcome": verdict.outcome,
        "step": verdict.step,
        "error": verdict.error,
        "rank": verdict.rank,
        "node": verdict.node,
        "phase": verdict.phase,
        "hung": verdict.hung,
        "checkpoint": newest_checkpoint(run),
    }
    record(run, attempt, "end", at, **dict(line, **facts))


def newest_checkpoint(run: RunDir) -> int:
    """Step of the newest checkpoint, 0 before the first."""
    return (run.checkpoint_steps() or [0])[0]


def close_lost_attempts(run: RunDir, now: float, why: str) -> None:
    """End, as lost, the attempts that started and could not write their end. For the owner of the run only."""
    lines = read_json_lines(run.attempts_ledger)
    ended = {line["attempt"] for line in lines if line["event"] == "end"}
    for line in lines:
        if line["event"] == "start" and line["attempt"] not in ended:
            asked = read_json(run.attempt(line["attempt"]).drain) or {}
            facts = {"host": line["host"], "job_id": line.get("job_id"), "cause": asked.get("cause")}
            record(run, line["attempt"], "end", now, outcome=LOST, error=why, **facts)


def point_latest(attempt: Attempt, tag: str) -> None:
    """Have logs/latest lead to this attempt's logs.

    Args:
        tag: tells this process from others that do the same.
    """
    fresh = attempt.latest_logs.with_name(".latest.{}".format(tag))
    if fresh.is_symlink():
        fresh.unlink()
    fresh.symlink_to(attempt.logs.name)
    fresh.replace(attempt.latest_logs)
