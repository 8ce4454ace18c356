"""attempts.jsonl: one line per start and end of an attempt."""

import socket
from typing import Any, Dict, List, Optional

from launcher.host.judge.verdict import Verdict
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.run_dir import append_json_line, read_json_lines


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


def start_of(run: RunDir, attempt: int) -> Optional[Dict[str, Any]]:
    """The line of an attempt's start."""
    lines = read_json_lines(run.attempts_ledger)
    return next((line for line in lines if line["event"] == "start" and line["attempt"] == attempt), None)


def unended(run: RunDir) -> List[Dict[str, Any]]:
    """The starts of attempts whose end nobody has recorded."""
    lines = read_json_lines(run.attempts_ledger)
    ended = {line["attempt"] for line in lines if line["event"] == "end"}
    return [line for line in lines if line["event"] == "start" and line["attempt"] not in ended]


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
