"""attempts.jsonl: one line per start and end of an attempt."""

import socket
from typing import Any

from megatron_rl.run_dir import Attempt, RunDir, append_json_line, read_json, read_json_lines

LOST = "lost"


def record(run: RunDir, attempt: int, event: str, at: float, **facts: Any) -> None:
    line = {"attempt": attempt, "event": event, "at": at, "host": socket.gethostname()}
    line.update(facts)
    append_json_line(run.attempts_ledger, line)


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
