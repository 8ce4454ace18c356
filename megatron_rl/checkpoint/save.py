"""Saving beside the training loop, and restoring.

    checkpointer = Checkpointer(run_dir, config.save, control) # every rank
    checkpointer.restore(load)                                 # from the newest good one, if there is any
    checkpointer.load_ahead()                                  # what the first save needs, while the run trains
    checkpointer.save(step, sharded_state, {"cursor": ...})    # blocks for the copy to the host
    for outcome in checkpointer.poll(): ...                    # CheckpointSaved or SaveFailed, once per save
    checkpointer.wait(final=True)                              # before the ranks leave

checkpoint_writer.py assembles a checkpoint from all ranks, publish.py publishes it.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.load import VerifiedCheckpoint, published_steps, restore_newest
from megatron_rl.checkpoint.publish import SaveFailed, SaveOutcome, clean_up, find_latest, pass_over
from megatron_rl.contract.checkpoint_interval import SaveCost
from megatron_rl.contract.manifest import CheckpointError, CheckpointSaved
from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.control import Control
from megatron_rl.recipe.save_section import SaveConfig

if TYPE_CHECKING:  # torch's checkpoints take half a second to import, and a run trains before it saves
    from megatron_rl.checkpoint.checkpoint_writer import CheckpointWriter, SaveInProgress
    from megatron_rl.checkpoint.shards import HostCopies


class Checkpointer:
    """Saves one run. Every rank creates one after init_process_group. Creation is collective and deletes debris of
    crashes from the checkpoints folder."""

    def __init__(self, run_dir: RunDir, config: SaveConfig, control: Control) -> None:
        """control: all ranks. Raises CheckpointError if checkpoints that the record mentions are missing."""
        self.run_dir = run_dir
        self.config = config
        self.control = control
        if control.rank == 0:
            clean_up(run_dir)
        self._found = published_steps(run_dir, control)
        self._session = control.share(secrets.token_hex(4))
        self._saves = 0  # calls of `save`; every rank counts the same
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._loaded_ahead = False
        self._running: tuple[SaveInProgress, Future[SaveOutcome]] | None = None
        self._last: SaveOutcome | None = None
        self._unread: list[SaveOutcome] = []
        self._blocked_s: float | None = None
        self._total_s: float | None = None
        self.published: int | None = None  # step of the newest checkpoint published since this start of the ranks
        self.newest = 0
        """Step of the newest checkpoint in this line of training, published or restored; 0: none. Ranks may learn it at
        different times."""

    @cached_property
    def _copies(self) -> HostCopies:
        from megatron_rl.checkpoint.shards import HostCopies

        return HostCopies()

    @cached_property
    def _writer(self) -> CheckpointWriter:
        from megatron_rl.checkpoint.checkpoint_writer import CheckpointWriter

        return CheckpointWriter(self.run_dir, self.config, self.control.rank, self.control.size)

    def load_ahead(self) -> None:
        """Have the writer's thread import what the first save needs, so that a run which is asked to leave soon does
        not spend its time on that. Returns at once."""
        if not self._loaded_ahead:
            self._loaded_ahead = True
            self._thread.submit(import_module, "megatron_rl.checkpoint.checkpoint_writer")

    @property
    def resumes(self) -> bool:
        """Whether the run has a checkpoint, so that `restore` resumes from one or raises; valid before the first
        save."""
        return bool(self._found)

    def restore(self, restore: Callable[[VerifiedCheckpoint], None]) -> VerifiedCheckpoint | None:
        """Resume from the newest good checkpoint, None if the run has none: see `restore_newest`. Collective; call it
        before the first `save`."""
        checkpoint = restore_newest(self.run_dir, self._found, restore, self.control)
        if checkpoint is None:
            return None
        manifest = checkpoint.manifest
        self._writer.parent = self.newest = manifest.step
        self._blocked_s, self._total_s = manifest.blocked_s, manifest.total_s
        return checkpoint

    def pass_over_newer(self) -> None:
        """Give up the checkpoints that `restore` passed over. Call it on rank 0, before the record of their steps is
        cut back. Raises OSError, also if there are checkpoints that `restore` has not seen."""
        newer = [step for step in self.run_dir.checkpoint_steps() if step > self.newest]
        if unseen := sorted({*newer} - {*self._found}):
            raise OSError(f"{self.run_dir.checkpoint(unseen[-1])} was not there when this start looked for checkpoints")
        if newer:
            pass_over(self.run_dir, newer, self.newest)

    def save(
        self, step: int, sharded_state: dict[str, Any], meta: dict[str, Any], needed: Callable[[], None] | None = None
    ) -> None:
        """Save the state after `step`. Every rank calls it between the same two steps.

        Waits for an earlier save, copies this rank's shards to the host and returns; the write continues in a thread.

        sharded_state: megatron-core's sharded state dict; its unsharded parts must be equal on all ranks.
        meta: small JSON object that `read` returns; rank 0's is written.
        needed: called in the thread. Returns once all other data that a resumed run needs from this rank is on disk, or
            raises OSError, and the save fails.
        """
        from megatron_rl.checkpoint.checkpoint_writer import SaveInProgress

        started = time.monotonic()
        self._saves += 1
        if not self.wait():
            self._note(SaveFailed(step, "an earlier save still hangs in the file system"))
            return
        save_id = f"{self._session}-{self._saves:04d}"
        folder = self.run_dir.unfinished_checkpoint(step, save_id)
        snapshot = self._copies.take(sharded_state)
        meta = json.loads(json.dumps(meta))
        save = SaveInProgress(step, save_id, folder, snapshot, meta, started, self.config.timeout_s, needed)
        self._blocked_s = save.blocked_s = time.monotonic() - started
        self._running = save, self._thread.submit(self._writer.run, save)

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes since the last call, oldest first, the same on every rank, without waiting. Rank 0 logs
        and counts them: a SaveFailed does not stop the run."""
        self._finish_what_is_done()
        unread, self._unread = self._unread, []
        return unread

    @property
    def saving(self) -> int | None:
        """Step that is being written; None without any, or if it hangs and `wait` has reported so."""
        self._finish_what_is_done()
        return self._running[0].step if self._running and not self._running[0].hang_noted else None

    @property
    def cost(self) -> SaveCost | None:
        """SaveCost of a save: blocked seconds of the newest one, and total seconds of the newest published one (0: none
        yet), of this attempt or the checkpoint it resumed from. None before the first save. Ranks may learn it at
        different times."""
        return None if self._blocked_s is None else SaveCost(self._blocked_s, self._total_s or 0.0)

    def estimate_s(self) -> float | None:
        """Seconds that the next save may take until it is published, by the last published one. None before the first.
        Ranks may learn it at different times."""
        self._finish_what_is_done()
        return self._total_s

    def abandon(self, reason: str) -> None:
        """Give up the current save unless it is already being published. Call it on rank 0, or on all ranks; the others
        notice by themselves. `wait` reports the end. The previous checkpoint stays."""
        if self._running:
            self._running[0].given_up = reason

    def wait(self, *, until: float | None = None, final: bool = False) -> bool:
        """Wait for the current save, at most until its deadline plus a grace period, or `until` (time.monotonic()).

        Returns False if this rank still writes after that. With `final`, raises CheckpointError unless the last save
        was published: call it so before the ranks leave.
        """
        if self._running:
            save, future = self._running
            ends = save.hopeless_at if until is None else min(until, save.hopeless_at)
            if futures.wait([future], timeout=max(ends - time.monotonic(), 0.0)).done:
                self._finish_what_is_done()
            elif time.monotonic() >= save.hopeless_at and not save.hang_noted:
                save.hang_noted = True
                self._note(SaveFailed(save.step, f"a write to {save.folder} has been hanging for {save.timeout_s:g} s"))
        if final and isinstance(self._last, SaveFailed):
            newest = find_latest(self.run_dir).step
            kept = "no earlier one exists" if newest is None else f"the newest is that of step {newest}"
            raise CheckpointError(
                f"the last checkpoint of the run, of step {self._last.step}, was not saved: {self._last.reason}; "
                f"{kept}. Free space in {self.run_dir.checkpoints} or repair it, then resume the run"
            )
        return self._running is None

    def _finish_what_is_done(self) -> None:
        if self._running and self._running[1].done():
            outcome = self._running[1].result()  # raises errors of the program, but not of the file system
            self._running = None
            self._note(outcome)

    def _note(self, outcome: SaveOutcome) -> None:
        self._last = outcome
        if isinstance(outcome, CheckpointSaved):
            self._total_s = outcome.total_s
            self.published = self.newest = outcome.step
        self._unread.append(outcome)
