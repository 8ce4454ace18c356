"""Child processes with torch, which the launcher does not import: JSON objects go in and come out, a line each."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from subprocess import PIPE
from types import FrameType
from typing import Any

from launcher.errors import BadInput, Failed
from megatron_rl.contract.children import module_command
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, HASH_SEED, PARENT_VARIABLE
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.shapes import from_json
from megatron_rl.recipe.evaluation_job import Evaluation
from megatron_rl.recipe.extras import OF_RANKS, install_command, missing
from megatron_rl.recipe.requests import Trial


class TookTooLong(Exception):
    """A child did not end within its limit, and was killed."""


class ChildInterrupted(Exception):
    """A child was asked to stop, and has stopped."""


class ModuleProcess:
    """`python -m MODULE ARGUMENTS`, which leads a session, so that Ctrl-C does not reach it directly. It ends with this
    process. Raises Failed where it cannot be started."""

    def __init__(
        self, module: str, *arguments: str, environ: Mapping[str, str] | None = None, errors: int | None = PIPE
    ) -> None:
        """
        Args:
            environ: variables to change.
            errors: PIPE, to find the reason of a failure; None: its error output is this process's.
        """
        self._module = module
        try:
            self.process = subprocess.Popen(
                [*module_command(module), *arguments],
                env={**os.environ, **(environ or {}), **HASH_SEED, PARENT_VARIABLE: str(os.getpid())},
                stdin=PIPE,
                stdout=PIPE,
                stderr=errors,
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
        for line in self.process.stderr or ():
            if line.strip():
                self._complaints.append(line.strip())

    def __enter__(self) -> ModuleProcess:
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
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()

    def end_input(self) -> None:
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
                except (ValueError, RecursionError):
                    continue
                if isinstance(found, dict):
                    yield found
        finally:
            timer.cancel()
        if late.is_set():
            raise TookTooLong

    def wait(self) -> int:
        code = self.process.wait()
        self._reader.join()
        return code

    def finish(self) -> None:
        """Wait for its end. Raises BadInput or Failed unless it has done its work."""
        code = self.wait()
        if code != EXIT_FINISHED:
            raise self.failure(code)

    def failure(self, code: int) -> BadInput:
        last = self._complaints[-1] if self._complaints else ""
        if code == EXIT_USAGE:
            return BadInput(last)
        if last.startswith("ModuleNotFoundError: ") and (absent := missing([OF_RANKS])):
            return BadInput(f"not installed: {', '.join(absent)}; {install_command(OF_RANKS)}")
        return Failed(f"{self._module} ended with exit code {code}{': ' if last else ''}{last}")


def tried(trial: Trial) -> Iterator[dict[str, Any]]:
    """Try the first problems of an environment. Yields the results of `megatron_rl.run.standalone.trial.tried`. Raises
    BadInput where the environment cannot be built or the model not opened, Failed where the process fails."""
    with ModuleProcess("megatron_rl.run.standalone.trial") as child:
        child.send(trial.model_dump_json())
        child.end_input()
        yield from child.said()
        child.finish()


STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interruptible(module: str, *arguments: str, errors: int | None = PIPE) -> Iterator[ModuleProcess]:
    """Yield a child that Ctrl-C, SIGTERM and SIGHUP stop, not this process: the first asks it to end, the second kills
    it. After the block it has ended. Raises ChildInterrupted where it was stopped, and BadInput or Failed where it
    failed."""
    # The child leads its own session, so a Ctrl-C at the terminal reaches only this process, which decides what it
    # means: the first becomes SIGTERM, on which an evaluation keeps its answers and a server finishes its requests;
    # the next one kills. A signal may also arrive before the child exists, so it is sent again once there is one. A
    # child that was stopped and fails because of it counts as interrupted, not as failed.
    received: list[int] = []
    child: ModuleProcess | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None:
            child.signal(signal.SIGTERM if len(received) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        with ModuleProcess(module, *arguments, errors=errors) as child:
            if received:  # before the child existed
                child.signal(signal.SIGTERM)
            yield child
            code = child.wait()
            if code == EXIT_INTERRUPTED or (code != EXIT_FINISHED and received):
                raise ChildInterrupted
            child.finish()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def evaluate(evaluation: Evaluation, report: Callable[[Mapping[str, Any]], None]) -> tuple[EvaluationResult, str]:
    """Evaluate on this machine. Returns the result and the path of its file.

    report: gets the progress, as megatron_rl.run.evaluate.blocks.Progress.

    Raises:
        ChildInterrupted: it was stopped; its answers so far are kept.
        BadInput: the evaluation is impossible as requested.
        Failed: something else went wrong.
    """
    done = None
    with interruptible("megatron_rl.run.evaluate") as child:
        child.send(evaluation.model_dump_json())
        child.end_input()
        for said in child.said():
            if "progress" in said:
                report(said["progress"])
            elif "result" in said:
                done = from_json(EvaluationResult, said["result"]), said["out"]
    if done is None:
        raise Failed("the evaluation ended without a result")
    return done
