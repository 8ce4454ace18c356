"""This machine as a cluster of one: a supervisor process, started through submitit's local executor."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from submitit import LocalExecutor, LocalJob
from submitit.helpers import CommandFunction

from launcher.host.process.processes import start_time
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.rank.config import JobConfig

TEN_YEARS_MIN = 10 * 365 * 24 * 60  # submitit ends local jobs after two minutes unless told otherwise
RANK_COMMAND = [sys.executable, "-m", "megatron_rl.rank_main"]


@dataclass(frozen=True, slots=True)
class Submitted:
    """An attempt handed over to submitit."""

    job: LocalJob[str]
    folder: Path

    def ended(self) -> bool:
        return bool(self.job.done())

    def complaint(self) -> str:
        """What the supervisor said on its way out, where it never came to open its log."""
        return (self.job.stderr() or "").strip()

    def clean_up(self, patience_s: float = 5.0) -> None:
        """Remove submitit's files once its two processes have followed the supervisor."""
        give_up = time.monotonic() + patience_s
        while not self.ended() and time.monotonic() < give_up:
            time.sleep(0.05)
        if self.ended():
            shutil.rmtree(self.folder, ignore_errors=True)


def command(run: RunDir, attempt: Attempt, job: JobConfig, drain_limit_s: float, owner: int | None) -> list[str]:
    """The command that supervises one attempt here.

    Args:
        drain_limit_s: seconds the ranks have to save when they are asked to leave.
        owner: process id whose death drains the run; None lets it live on.
    """
    # submitit exports a CUDA_VISIBLE_DEVICES of its own making: put the user's back.
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    environment = ["-u", "CUDA_VISIBLE_DEVICES"] if mine is None else [f"CUDA_VISIBLE_DEVICES={mine}"]
    supervisor = ["env", *environment, sys.executable, "-m", "launcher.host.supervise"]
    supervisor += ["--run-dir", str(run.root.absolute()), "--attempt", str(attempt.number)]
    supervisor += ["--ranks", str(job.world_size), "--threads", str(job.threads_per_rank), "--device", job.device]
    supervisor += ["--drain-limit", str(drain_limit_s), "--silence-limit", str(job.silence_limit_s)]
    if owner is not None:
        supervisor += ["--owner", f"{owner}:{start_time(owner)}"]
    return [*supervisor, "--", *RANK_COMMAND]


def submit(supervisor: list[str]) -> Submitted:
    """Start the supervisor. What submitit pickles is this command and nothing of ours."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-submitit-"))
    executor = LocalExecutor(folder)
    executor.update_parameters(timeout_min=TEN_YEARS_MIN)
    with _away_from_the_terminal():
        job = executor.submit(CommandFunction(supervisor, verbose=False))
    return Submitted(job, folder)


@contextmanager
def _away_from_the_terminal() -> Iterator[None]:
    """What is started here inherits ignored Ctrl-C and hang-up and no terminal.

    submitit's controller and worker stay in our process group, where a Ctrl-C would make them kill the job, and
    keep our output open, so that `mrl-submit --detach | tee log` would never end.
    """
    handlers = {signum: signal.signal(signum, signal.SIG_IGN) for signum in (signal.SIGINT, signal.SIGHUP)}
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (0, 1, 2)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        yield
    finally:
        for descriptor, copy in enumerate(kept):
            os.dup2(copy, descriptor)
            os.close(copy)
        os.close(nowhere)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
