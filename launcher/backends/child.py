"""A child process that has torch, which the launcher has not: JSON objects go in and come out, a line each."""

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
from megatron_rl.agent.config import EnvironmentConfig
from megatron_rl.contract.children import module_command
from megatron_rl.contract.codes import EXIT_FINISHED, EXIT_INTERRUPTED, EXIT_USAGE, HASH_SEED, PARENT_VARIABLE
from megatron_rl.contract.evaluation_records import EvaluationResult
from megatron_rl.contract.shapes import from_json
from megatron_rl.evaluate.config import Evaluation


class Child:
    """`python -m MODULE`. It has a session of its own, so a Ctrl-C reaches it by us alone, and ends when we do."""

    def __init__(self, module: str) -> None:
        """Raises Failed where it cannot be started."""
        self._module = module
        try:
            self.process = subprocess.Popen(
                module_command(module),
                env={**os.environ, **HASH_SEED, PARENT_VARIABLE: str(os.getpid())},
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
            try:
                if stream:
                    stream.close()
            except BrokenPipeError:
                pass  # what was not taken any more

    def send(self, text: str) -> None:
        """Write one line; nothing where it has ended, which `said` and `wait` tell."""
        assert self.process.stdin
        try:
            self.process.stdin.write(text + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass

    def end_input(self) -> None:
        """Have it see the end of its input."""
        assert self.process.stdin
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def signal(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def said(self) -> Iterator[dict[str, Any]]:
        """The objects that it writes, until it ends; what libraries write is passed over."""
        assert self.process.stdout
        for line in self.process.stdout:
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait()
        self._reader.join()
        return code

    def failure(self, code: int) -> BadInput:
        """The error that an exit code means, in its own last words."""
        last = self._complaints[-1] if self._complaints else ""
        if code == EXIT_USAGE:
            return BadInput(last)
        return Failed(f"{self._module} ended with exit code {code}{': ' if last else ''}{last}")


def tried(environment: EnvironmentConfig, problems: int) -> Iterator[dict[str, Any]]:
    """Each of its first problems, as they are tried: see `megatron_rl.agent.trial.tried`.

    Raises BadInput where it cannot be built, Failed where the process did not end well.
    """
    with Child("megatron_rl.agent.trial") as child:
        child.send(json.dumps({"environment": environment.model_dump(), "problems": problems}))
        child.end_input()
        yield from child.said()
        code = child.wait()
        if code != EXIT_FINISHED:
            raise child.failure(code)


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
        with Child("megatron_rl.evaluate") as child:
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
