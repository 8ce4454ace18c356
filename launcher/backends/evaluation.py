"""An evaluation on this machine, by a child process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from launcher.backends.child import Child
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.shapes import from_json
from megatron_rl.evaluate.config import Evaluation

MODULE = "megatron_rl.evaluate"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The evaluation was asked to stop, and has; what had been answered is kept."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished evaluation."""

    result: EvaluationResult
    out: str
    """Its file."""


def evaluate(evaluation: Evaluation, report: Callable[[Mapping[str, Any]], None]) -> Done:
    """Evaluate on this machine; Ctrl-C, SIGTERM and SIGHUP are passed on, and the second of them kills.

    Args:
        report: told how far it is, as megatron_rl.evaluate.blocks.Progress.

    Raises:
        Interrupted: by one of those.
        BadInput: the evaluation cannot be made as it is asked for.
        Failed: something else went wrong.
    """
    heard: list[int] = []
    child: Child | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        heard.append(number)
        if child is not None:
            child.signal(signal.SIGTERM if len(heard) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in STOPPING}
    try:
        with Child(MODULE) as child:
            if heard:  # before there was a child to tell
                child.signal(signal.SIGTERM)
            child.send(evaluation.model_dump_json())
            child.end_input()
            done = None
            for said in child.said():
                if "progress" in said:
                    report(said["progress"])
                elif "result" in said:
                    done = Done(from_json(EvaluationResult, said["result"]), said["out"])
            code = child.wait()
            if code == EXIT_FINISHED and done:
                return done
            if code == EXIT_INTERRUPTED or heard:
                raise Interrupted
            raise child.failure(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
