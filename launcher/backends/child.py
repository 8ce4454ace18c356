"""Child processes with torch, which the launcher does not import: JSON objects go in and come out, a line each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from launcher.errors import BadInput, Failed
from megatron_rl.contract.children import module_command
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, HASH_SEED, PARENT_VARIABLE
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.shapes import from_json
from megatron_rl.evaluate.config import Evaluation
from megatron_rl.standalone.config import Trial


class TookTooLong(Exception):
    """A child did not end within its limit, and was killed."""


class Child:
    """`python -m MODULE`, in a session of its own, so that Ctrl-C does not reach it directly. It ends with this
    process. Raises Failed where it cannot be started."""

    def __init__(self, module: str, environ: Mapping[str, str] | None = None) -> None:
        """environ: variables to change."""
        self._module = module
        try:
            self.process = subprocess.Popen(
                module_command(module),
                env={**os.environ, **(environ or {}), **HASH_SEED, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"python -m {module} cannot be started: {error}") from error
        self._complaints: list[str] = []
        self._reader = threading.Thread(target=self._read_complaints, daemon=True)
        self._reader.start()

    def _read_complaints(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            if line.strip():
                self._complaints.append(line.strip())

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(BrokenPipeError):  # unread input
                if stream:
                    stream.close()

    def send(self, text: str) -> None:
        """Write one line; a no-op where the child has ended, which `said` and `wait` show."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def end_input(self) -> None:
        """Close its input."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def said(self, limit_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Objects that it writes, until it ends; other output, such as of libraries, is skipped.

        limit_s: seconds until it is killed with its descendants; None: no limit.

        Raises TookTooLong.
        """
        assert self.process.stdout
        late = threading.Event()

        def kill() -> None:
            late.set()
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

        timer = threading.Timer(max(limit_s or 0.0, 0.0), kill)
        if limit_s is not None:
            timer.start()
        try:
            for line in self.process.stdout:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict):
                    yield found
        finally:
            timer.cancel()
        if late.is_set():
            raise TookTooLong

    def wait(self) -> int:
        """Wait for its end. Returns the exit code."""
        code = self.process.wait()
        self._reader.join()
        return code

    def failure(self, code: int) -> BadInput:
        """Error for an exit code, with the child's last line on stderr."""
        last = self._complaints[-1] if self._complaints else ""
        if code == EXIT_USAGE:
            return BadInput(last)
        return Failed(f"{self._module} ended with exit code {code}{': ' if last else ''}{last}")


def tried(trial: Trial) -> Iterator[dict[str, Any]]:
    """Try the first problems of an environment. Yields the results of `megatron_rl.standalone.trial.tried`.

    Raises BadInput where the environment cannot be built or the model not opened, Failed where the process fails.
    """
    with Child("megatron_rl.standalone.trial") as child:
        child.send(trial.model_dump_json())
        child.end_input()
        yield from child.said()
        code = child.wait()
        if code != EXIT_FINISHED:
            raise child.failure(code)


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The evaluation was asked to stop and has stopped; its answers so far are kept."""


@dataclass(frozen=True, slots=True)
class Done:
    """A finished evaluation."""

    result: EvaluationResult
    out: str
    """Path of the result file."""


def evaluate(evaluation: Evaluation, report: Callable[[Mapping[str, Any]], None]) -> Done:
    """Evaluate on this machine. The first Ctrl-C, SIGTERM or SIGHUP is passed on, the second kills the child.

    Args:
        report: gets the progress, as megatron_rl.evaluate.blocks.Progress.

    Raises:
        Interrupted: by one of these signals.
        BadInput: the evaluation is impossible as requested.
        Failed: something else went wrong.
    """
    received: list[int] = []
    child: Child | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, forward) for number in STOPPING}
    try:
        with Child("megatron_rl.evaluate") as child:
            if received:  # before the child existed
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
            if code == EXIT_INTERRUPTED or received:
                raise Interrupted
            raise child.failure(code)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
