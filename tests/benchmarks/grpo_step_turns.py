"""Contestants that take turns: processes that train during their turn and sleep during another's.

The parent holds a `Contestant`, the first process of a contestant a `Turns`. They exchange lines: the parent writes the
number of steps to train, and the contestant answers with a JSON list, an object per step. Both sides stay warm, and
start-up is never measured.
"""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.host.attempt.local_ranks import KEPT_MEMORY, WAITING_THREADS


class Turns:
    """The contestant's end: stdin and stdout, which nothing else may print to."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._steps: list[dict] = []
        self._wanted = 0
        self._clock = 0.0

    def ready(self, **facts: object) -> None:
        """Send the parent its information and wait for the first turn."""
        self._answer([facts])

    def step_ended(self, **facts: object) -> None:
        """Record a step, and wait for the next turn if this one is complete.

        Each step gets `seconds`, from the end of the previous step or from the start of the turn.
        """
        now = time.perf_counter()
        self._steps.append({"seconds": now - self._clock, **facts})
        self._clock = now
        if len(self._steps) == self._wanted:
            self._answer(self._steps)

    def _answer(self, lines: Sequence[dict]) -> None:
        print(json.dumps(lines), file=self._answers)
        self._steps = []
        wanted = sys.stdin.readline()
        if not wanted:
            os._exit(0)  # the parent and the other ranks are gone; a normal exit would wait for them
        self._wanted = int(wanted)
        self._clock = time.perf_counter()


class ContestantFailed(RuntimeError):
    """A contestant ended or did not answer in time; the message ends with its last output."""


class Contestant:
    """The parent's end, which owns the contestant's processes and ends them."""

    def __init__(
        self,
        name: str,
        script: Path,
        folder: Path,
        *,
        ranks: int,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `ranks` processes `python script folder` with `threads` threads each, and with RANK, WORLD_SIZE and so
        on if there are several."""
        self.name = name
        self._logs = [folder / f"{name.replace(' ', '-')}.{rank}.log" for rank in range(ranks)]
        self._processes = []
        for rank, log in enumerate(self._logs):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            world = {name: str(number) for name, number in place.items()} if ranks > 1 else {}
            variables = {
                "OMP_NUM_THREADS": str(threads),
                "MKL_NUM_THREADS": str(threads),
                **KEPT_MEMORY,
                **WAITING_THREADS,  # as in the launcher; otherwise other work slows each side several times
                "MRL_PARENT_PID": str(os.getpid()),
                "MRL_CACHE": str(folder),
            }
            with log.open("w") as output:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, script, folder],
                        env=os.environ | variables | world | dict(environment or {}),
                        stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
                        stdout=output if rank else subprocess.PIPE,
                        stderr=output,
                        text=True,
                    )
                )

    def __enter__(self) -> "Contestant":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def ready(self, timeout_s: float) -> dict:
        [facts] = self._answer(timeout_s)
        return facts

    def turn(self, steps: int, timeout_s: float) -> list[dict]:
        """Train `steps` steps. Returns an object per step. Raises ContestantFailed."""
        stdin = self._processes[0].stdin
        assert stdin is not None
        try:
            print(steps, file=stdin, flush=True)
        except BrokenPipeError:
            raise self._failed("ended") from None
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> list[dict]:
        stdout = self._processes[0].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            deadline = time.monotonic() + timeout_s
            while not selector.select(timeout=1.0):
                if any(process.poll() is not None for process in self._processes):
                    raise self._failed("lost a process")
                if time.monotonic() > deadline:
                    raise self._failed(f"did not answer within {timeout_s:g} s")
        line = stdout.readline()  # complete, since it is written at once
        if not line:
            raise self._failed("ended")
        return json.loads(line)

    def _failed(self, what: str) -> ContestantFailed:
        tails = (f"--- {log}\n{''.join(log.read_text().splitlines(keepends=True)[-15:])}" for log in self._logs)
        return ContestantFailed(f"{self.name} {what}\n" + "\n".join(tails))
