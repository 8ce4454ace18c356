"""Owners of what shows the record of a run: a thread of rank 0 for TensorBoard, a process for each other tracker.

    rank 0 -> metrics.jsonl, evaluations.jsonl -> megatron_rl.rank.metrics.trackers.upload wandb -> wandb -> its service

The network, threads, helper processes and exit hooks of a tracker's package may block for minutes. In a child that
reads the record from disk they block nothing: the run is neither slower nor shorter if they fail.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from megatron_rl.contract.child import Child
from megatron_rl.contract.children import how_ended, module_command
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.rank.metrics.trackers.tracker import follow
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.extras import is_installed, needed
from megatron_rl.recipe.logs import LoggingConfig
from megatron_rl.recipe.trackers import PACKAGES

logger = logging.getLogger(__name__)

RESTART_S = 300.0  # seconds between two starts of a follower that ended, for example by a wrong key or a full disk
FINISH_S = 5.0  # seconds for the last steps once the record is complete: ranks that leave have little time
KILL_S = 1.0  # further seconds until a child, which ends itself after FINISH_S, is killed
TITLES = {"wandb": "W&B", "mlflow": "MLflow"}


def check_installed(config: LoggingConfig) -> None:
    """Raise ConfigurationError if the recipe asks for a tracker whose package is not installed."""
    for name in config.trackers:
        if not is_installed(PACKAGES[name]):  # an import would also find a folder ./wandb that wandb leaves behind
            raise ConfigurationError(
                f"logging.{name}: {PACKAGES[name]} is not installed where the ranks run, which need {needed(name)}; "
                f"or set logging.{name} to null"
            )


class Follower(Protocol):
    """Thread or process that shows the record to a tracker. It ends once the record is complete, or when it fails."""

    def start(self) -> None:
        """Raise OSError if it cannot start."""

    def why_ended(self) -> str | None:
        """None while it runs; empty if it did its work."""

    def tell_complete(self) -> None:
        """Tell it that the record is complete. Returns at once."""

    def end(self, limit_s: float) -> str:
        """Wait for its end, at most `limit_s` seconds. Returns why it failed; empty if it did its work."""


class Mirror:
    """Owner of a follower. Logs the first failure and retries: every start shows all that the tracker lacks."""

    def __init__(self, title: str, follower: Follower) -> None:
        self._title, self._follower = title, follower
        self._runs = self._warned = False
        self._start()

    def restart_if_ended(self) -> None:
        """Restart a follower that has ended, at most every RESTART_S. Returns at once."""
        if self._runs and (why := self._follower.why_ended()) is not None:
            self._runs = False
            self._miss(why)
        if not self._runs and time.monotonic() >= self._again:
            self._start()

    def tell_complete(self) -> None:
        if self._runs:
            self._follower.tell_complete()

    def close(self, limit_s: float) -> None:
        if self._runs:
            self._miss(self._follower.end(limit_s))
            self._runs = False

    def _start(self) -> None:
        self._again = time.monotonic() + RESTART_S
        try:
            self._follower.start()
            self._runs = True
        except OSError as error:
            self._miss(f"did not start: {error}")

    def _miss(self, why: str) -> None:
        if why and not self._warned:
            logger.warning(
                "%s is behind; the run continues and will show the rest there later. It %s", self._title, why
            )
            self._warned = True


class ChildFollower:
    """Follower in a process."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, name: str) -> None:
        program = module_command("megatron_rl.rank.metrics.trackers.upload")
        self._command = [*program, "--limit", str(FINISH_S), name, str(run_dir.root)]
        self._log = attempt.log(0, role=name)
        self._process: Child | None = None

    def start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        theirs, self._life_line = os.pipe()  # it ends with this process, or in `tell_complete`
        try:
            self._process = Child([*self._command, "--until", str(theirs)], output=self._log, inherited=[theirs])
        except OSError:
            os.close(self._life_line)
            raise
        finally:
            os.close(theirs)

    def why_ended(self) -> str | None:
        assert self._process is not None
        if self._process.exit_code() is None:
            return None
        os.close(self._life_line)
        return self._reap(self._process)

    def tell_complete(self) -> None:
        os.close(self._life_line)

    def end(self, limit_s: float) -> str:
        assert self._process is not None
        self._process.wait(limit_s + KILL_S)
        return self._reap(self._process)

    def _reap(self, process: Child) -> str:
        code = process.exit_code()
        process.close(KILL_S)
        if code is None:
            return "did not end in time and was killed"
        return f"failed: {self._last_line() or how_ended(code)} ({self._log})" if code else ""

    def _last_line(self) -> str:
        """Reason that the child gives; empty if it could write none."""
        try:
            return self._log.read_text(encoding="utf-8", errors="replace").strip().rpartition("\n")[2]
        except OSError as error:
            return str(error)


class EventFilesFollower:
    """Follower of TensorBoard, in a thread."""

    def __init__(self, run_dir: RunDir, attempt: Attempt, last_step: int) -> None:
        self._run_dir, self._attempt, self._last_step = run_dir, attempt, last_step

    def start(self) -> None:
        self._over, self._why = threading.Event(), ""
        self._thread = threading.Thread(target=self._follow, name="tensorboard", daemon=True)
        self._thread.start()

    def why_ended(self) -> str | None:
        return None if self._thread.is_alive() else self._why

    def tell_complete(self) -> None:
        self._over.set()

    def end(self, limit_s: float) -> str:
        self._thread.join(limit_s)
        return f"took longer than {limit_s:.3g} s to write the last steps" if self._thread.is_alive() else self._why

    def _follow(self) -> None:
        # The import takes half a second, which the thread spends beside the start of the run.
        from megatron_rl.rank.metrics.trackers.event_files import EventFiles

        try:
            files = EventFiles(self._run_dir, self._last_step)
            follow(self._run_dir, self._attempt, files, self._over, files.evaluated, files.note)
        except OSError as error:
            self._why = f"failed: {error}"


def mirrors_of(run_dir: RunDir, attempt: Attempt, config: LoggingConfig, last_step: int) -> list[Mirror]:
    """Begin to show the record to TensorBoard, and to the trackers that the recipe asks for.

    last_step: step of the checkpoint that the attempt resumes from; 0 for none.
    """
    children = [Mirror(TITLES.get(name, name), ChildFollower(run_dir, attempt, name)) for name in config.trackers]
    return [Mirror("TensorBoard", EventFilesFollower(run_dir, attempt, last_step)), *children]


def close_all(mirrors: Sequence[Mirror]) -> None:
    """End all mirrors of a complete record, within FINISH_S + KILL_S seconds."""
    deadline = time.monotonic() + FINISH_S
    for mirror in mirrors:
        mirror.tell_complete()
    for mirror in mirrors:
        mirror.close(max(0.0, deadline - time.monotonic()))
