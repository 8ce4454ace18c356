"""An evaluation in a child process: the launcher itself imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from launcher.errors import BadInput, Failed
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, PARENT_VARIABLE
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.shapes import from_json
from megatron_rl.evaluate.config import Evaluation

COMMAND = [sys.executable, "-m", "megatron_rl.evaluate"]


class Interrupted(Exception):
    """The evaluation was asked to stop, and has; what had been answered is kept."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished evaluation."""

    result: EvaluationResult
    out: str
    """Its file."""


def evaluate(evaluation: Evaluation, report: Callable[[Mapping[str, Any]], None]) -> Done:
    """Evaluate on this machine; Ctrl-C, SIGTERM and SIGHUP are passed on.

    Args:
        report: told how far it is, as megatron_rl.evaluate.evaluator.Progress.

    Raises:
        Interrupted: by one of those.
        BadInput: the evaluation cannot be made as it is asked for.
        Failed: something else went wrong.
    """
    heard: list[int] = []
    child: subprocess.Popen[str] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if child is not None and child.poll() is None:
            child.send_signal(signal.SIGTERM if len(heard) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        # In a session of its own: each Ctrl-C reaches it once, by us.
        child = subprocess.Popen(
            COMMAND,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        with child:
            if heard:  # before there was a child to tell
                child.terminate()
            return _follow(child, evaluation, report, heard)
    except OSError as error:
        raise Failed(f"the evaluation cannot be started: {error}") from error
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(
    child: subprocess.Popen[str],
    evaluation: Evaluation,
    report: Callable[[Mapping[str, Any]], None],
    heard: list[int],
) -> Done:
    assert child.stdin and child.stdout and child.stderr
    complaints: list[str] = []
    reader = threading.Thread(target=lambda: complaints.extend(child.stderr or ()), daemon=True)
    reader.start()
    try:
        child.stdin.write(evaluation.model_dump_json())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it has ended, and says why
    done = None
    for line in child.stdout:
        try:
            said = json.loads(line)
        except ValueError:
            continue  # of a library
        if "progress" in said:
            report(said["progress"])
        elif "result" in said:
            done = Done(from_json(EvaluationResult, said["result"]), said["out"])
    code = child.wait()
    reader.join()
    if code == EXIT_FINISHED and done:
        return done
    if code == EXIT_INTERRUPTED or heard:
        raise Interrupted
    last = next((line.strip() for line in reversed(complaints) if line.strip()), "")
    if code == EXIT_USAGE:
        raise BadInput(last)
    raise Failed(f"the evaluation ended with exit code {code}{': ' if last else ''}{last}")
