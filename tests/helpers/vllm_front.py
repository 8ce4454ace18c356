"""Fronts of replicas with the real vLLM: processes of its own environment, as a launcher starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from commands import Command
from loop_helpers import lines_of

from launcher.host.attempt.replicas import forget_start
from launcher.host.record.evidence import read_replicas
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import PARENT_VARIABLE, START_VARIABLE
from megatron_rl.contract.paths import INFER, NUMBER_OPTIONS, RunDir
from megatron_rl.contract.records import read

REPOSITORY = Path(__file__).parents[2]
PYTHON_VARIABLE = "MRL_VLLM_PYTHON"
"""Names the interpreter that has vLLM."""
START_S = 600.0
"""Limit of a start, in seconds: its processes import vLLM on a machine that may be busy."""
END_S = 60.0
LIMIT_S = 2 * START_S
"""Limit of a start, and the run after it."""


class Front:
    """One start of a replica. Leaving the context ends it with all processes that it has started."""

    def __init__(
        self,
        run: RunDir,
        number: int = 0,
        start: int = 0,
        attempt: int = 1,
        *,
        kind: str = INFER,
        python: str | None = None,
        threads: int = 1,
    ) -> None:
        """python: interpreter of the replica; default: the one with vLLM."""
        self.run = run
        self.replica = run.attempt(attempt).replica(number, kind)
        self.log = run.root / f"log.{attempt}.{kind}-{number}.{start}"
        self._seen: set[psutil.Process] = set()
        forget_start(self.replica)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MRL"))}
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": str(threads)}
        ours = {START_VARIABLE: str(start), PARENT_VARIABLE: str(os.getpid()), "PYTHONPATH": str(REPOSITORY)}
        which = ["--run-dir", str(run.root), "--attempt", str(attempt), NUMBER_OPTIONS[kind], str(number)]
        with self.log.open("w") as log:
            self.process = psutil.Popen(
                [python or os.environ[PYTHON_VARIABLE], "-P", "-m", "megatron_rl.replica_main", *which],
                env={**environment, **place, **ours},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        for process in [self.process, *self.children()]:
            if process.is_running():
                process.kill()
        self.process.wait()

    @property
    def address(self) -> ReplicaAddress | None:
        """Address of this start; None before it answers."""
        found = read(ReplicaAddress, self.replica.listener)
        return found if isinstance(found, ReplicaAddress) else None

    def wait_until_it_answers(self) -> Front:
        until(lambda: self.address is not None, f"{self.log} answers", START_S, self.check)
        return self

    def check(self) -> None:
        assert self.process.poll() is None, f"the front ended with {self.process.poll()}\n{self.text()}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def error(self) -> str:
        return str(json.loads(self.replica.error(0).read_text())["error"])

    def children(self) -> list[psutil.Process]:
        """All processes that this front has started, and which this call or an earlier one has seen."""
        if self.process.is_running():
            self._seen.update(self.process.children(recursive=True))
        for process in [*self._seen]:
            if process.is_running():
                self._seen.update(process.children(recursive=True))
        return [process for process in self._seen if is_there(process)]

    def server(self) -> psutil.Process:
        """Process of vLLM that answers requests."""
        guard = self.guard()
        (found,) = [process for process in self.children() if process.ppid() == guard.pid]
        return found

    def guard(self) -> psutil.Process:
        (found,) = [process for process in self.children() if process.ppid() == self.process.pid]
        return found

    def folder(self) -> Path:
        """Folder with the socket of vLLM."""
        (option,) = [word for word in self.server().cmdline() if word.startswith("--uds=")]
        return Path(option.partition("=")[2]).parent

    def computing(self) -> list[psutil.Process]:
        """Processes of vLLM that compute: the engine's core and its workers."""
        others = (self.process, self.guard(), self.server())
        return [each for each in self.children() if each.is_running() and each not in others]


class LocalRun:
    """A run under a local supervisor."""

    def __init__(self, root: Path, *words: str) -> None:
        self.dir = RunDir(root)
        self.commands: list[Command] = []
        self.start("mrl-submit", *words, "--run-dir", str(root))

    def start(self, *words: str) -> None:
        output = os.open(self.dir.root.with_suffix(".out"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        folder = self.dir.root.parent
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
        self.commands.append(Command(words, stdout=output, stderr=output, cwd=folder, env=environment))
        os.close(output)

    def end(self) -> int:
        return self.commands[-1].wait(LIMIT_S)

    @property
    def step(self) -> int:
        lines = lines_of(self.dir.metrics) if self.dir.metrics.exists() else []
        return int(lines[-1]["step"]) if lines else 0

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        until(lambda: self.step >= step, f"step {step}\n{self.log()}", limit_s, self.check)

    def check(self) -> None:
        assert self.commands[-1].poll() is None, f"the run ended with {self.commands[-1].returncode}\n{self.log()}"

    def log(self) -> str:
        files = [self.dir.root.with_suffix(".out"), *sorted(self.dir.root.glob("logs/attempt-*/*.log"))]
        return "".join(f"--- {file}\n{file.read_text(errors='replace')[-2000:]}" for file in files if file.exists())

    def drain(self) -> None:
        self.commands[-1].send_signal(signal.SIGINT)
        assert self.end() == 130, self.log()

    def front(self, replica: int, kind: str = INFER) -> psutil.Process:
        """Process of the replica's present start."""
        wanted = ["--run-dir", str(self.dir.root), "--attempt", str(self.dir.last_attempt())]
        wanted += [NUMBER_OPTIONS[kind], str(replica)]
        (found,) = [each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[-6:] == wanted]
        return found

    def starts(self, replica: int) -> int:
        return read_replicas(self.dir.attempt(self.dir.last_attempt()))[replica].starts

    def replicas(self) -> int:
        """Replicas that answered in the newest step."""
        return int(lines_of(self.dir.metrics)[-1]["system/replicas"])


def is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def until(
    holds: Callable[[], object], what: str, limit_s: float = END_S, check: Callable[[], object] = lambda: None
) -> None:
    """Wait until `holds()` is true; `check` may fail the test before."""
    deadline = time.monotonic() + limit_s
    while not holds():
        check()
        assert time.monotonic() < deadline, f"not within {limit_s:.0f} s: {what}"
        time.sleep(0.1)
