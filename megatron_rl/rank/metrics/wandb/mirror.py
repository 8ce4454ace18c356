"""Weights & Biases, if the recipe asks for it: a process beside rank 0 uploads the record.

    rank 0 -> metrics.jsonl, evaluations.jsonl -> megatron_rl.rank.metrics.wandb.upload -> wandb -> its service

wandb's network, threads, helper process and exit hooks may block for minutes. In a child that reads the record from
disk they block nothing: the run is neither slower nor shorter if they fail.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import time

from megatron_rl.contract.child import Child
from megatron_rl.contract.children import module_command
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.extras import needed
from megatron_rl.recipe.logs import LoggingConfig

logger = logging.getLogger(__name__)

RESTART_S = 300.0  # seconds between two starts of a child that ended, for example by a wrong key or a full disk
FINISH_S = 5.0  # seconds for the last uploads once the record is complete: ranks that leave have little time
KILL_S = 1.0  # further seconds until the child, which ends itself after FINISH_S, is killed


def check_installed(config: LoggingConfig) -> None:
    """Raise ConfigurationError if the recipe asks for W&B and wandb is not installed."""
    if config.wandb is None:
        return
    try:
        importlib.metadata.version("wandb")  # an import would also find the folder ./wandb that wandb leaves behind
    except importlib.metadata.PackageNotFoundError:
        raise ConfigurationError(
            f"logging.wandb: wandb is not installed where the ranks run, which need {needed('wandb')}; or set "
            "logging.wandb to null"
        ) from None


class Mirror:
    """Owner of the child. Logs the first failure and retries: every start uploads the whole record."""

    def __init__(self, run_dir: RunDir, attempt: Attempt) -> None:
        program = module_command("megatron_rl.rank.metrics.wandb.upload")
        self._command = [*program, "--limit", str(FINISH_S), str(run_dir.root)]
        self._log = attempt.log(0, role="wandb")
        self._process: Child | None = None
        self._warned = False
        self._start()

    def restart_if_ended(self) -> None:
        """Restart a child that has ended, at most every RESTART_S. Returns at once."""
        if self._process is not None and self._process.exit_code() is not None:
            os.close(self._life_line)
            self._end(self._process)
        if self._process is None and time.monotonic() >= self._again:
            self._start()

    def close(self) -> None:
        """End the child of a complete record, within FINISH_S + KILL_S seconds."""
        if self._process is None:
            return
        os.close(self._life_line)
        self._process.wait(FINISH_S + KILL_S)
        self._end(self._process)

    def _start(self) -> None:
        self._again = time.monotonic() + RESTART_S
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            self._log.unlink(missing_ok=True)
            theirs, self._life_line = os.pipe()  # it ends with this process, or in `close`
            try:
                command = [*self._command, "--until", str(theirs)]
                self._process = Child(command, output=self._log, inherited=[theirs])
            finally:
                os.close(theirs)
                if self._process is None:
                    os.close(self._life_line)
        except OSError as error:
            self._miss(f"does not start: {error}")

    def _end(self, process: Child) -> None:
        code = process.exit_code()
        process.close(KILL_S)
        if code is None:
            self._miss("did not end in time and was killed")
        elif code != 0:
            self._miss(f"ended: {self._last_line()}")
        self._process = None

    def _miss(self, why: str) -> None:
        if not self._warned:
            logger.warning("W&B is behind; the run continues and will upload the rest later. Its process %s", why)
        self._warned = True

    def _last_line(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().split("\n")
        except OSError as error:
            return str(error)
        return f"{lines[-1]} ({self._log})"
