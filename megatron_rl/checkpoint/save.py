"""Saving behind the training loop.

    checkpointer = Checkpointer(run_dir, config.save)          # every rank
    checkpointer.save(step, sharded_state, {"cursor": ...})    # blocks for the copy to the host
    for outcome in checkpointer.poll(): ...                    # Published or SaveFailed, once per save
    checkpointer.wait(final=True)                              # before the ranks leave

No collective runs while a save is under way, so it cannot get between those of the training loop. Each rank's one
background thread writes the shards of its rank into a folder `step-N.ID.tmp` and tells rank 0 so by a file in it:

    rank 0                                      rank k
    writes its shards                           writes its shards
    waits for part.k of every k                 renames part.k into place (or failed.k)
    metadata, manifest, rename to step-N        waits until the folder is gone: step-N has its ID = published

A save that fails, on whichever rank, is withdrawn by rank 0: the folder is renamed away, so that ranks still writing
notice, and emptied. The checkpoints before it and `latest` are never touched by a save that is not complete.
"""

from __future__ import annotations

import json
import pickle
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.checkpoint.publish import (
    CheckpointError,
    Manifest,
    clean_up,
    discard,
    find_latest,
    publish,
    read_manifest,
)
from megatron_rl.checkpoint.shards import HostCopies, Part, Snapshot, write_metadata, write_part
from megatron_rl.config import Save
from megatron_rl.run_dir import RunDir

# Rank 0 ends a save at its deadline; the others give its verdict this long to arrive, and the training loop gives
# its own thread as long again.
GRACE_S = 10.0
_SHORTEST_LOOK_S = 0.005
_LONGEST_LOOK_S = 0.5


@dataclass(frozen=True)
class Published:
    step: int
    bytes: int
    """Of all ranks, manifest aside."""
    blocked_s: float
    """How long `save` kept this rank's training loop."""
    total_s: float
    """From the call of `save` to the published checkpoint."""


@dataclass(frozen=True)
class SaveFailed:
    step: int
    reason: str

    def __str__(self) -> str:
        return f"the checkpoint of step {self.step} was not saved: {self.reason}. The previous one is untouched"


Outcome = Published | SaveFailed


class _Abandoned(Exception):
    """The save cannot be completed; the message says why."""


@dataclass
class _Save:
    """One save under way on this rank."""

    step: int
    id: str
    folder: Path
    snapshot: Snapshot
    meta: dict[str, Any]
    started: float
    timeout_s: float
    blocked_s: float = 0.0
    hang_noted: bool = False

    @property
    def withdrawn(self) -> Path:
        return self.folder.with_name(f"{self.folder.stem}.withdrawn.tmp")

    def check(self, waiting_for: str, grace_s: float = 0.0) -> None:
        """Raises _Abandoned past the deadline, or where the training loop has ended without waiting."""
        if time.monotonic() > self.started + self.timeout_s + grace_s:
            raise _Abandoned(f"not done within save.timeout_s = {self.timeout_s:g} s: {waiting_for}")
        if not threading.main_thread().is_alive():
            raise _Abandoned(f"the process ends: {waiting_for}")


class Checkpointer:
    """Saves one run. Every rank makes one, after init_process_group; making it is collective and clears away what
    a crash left in the checkpoints folder."""

    def __init__(self, run_dir: RunDir, config: Save) -> None:
        self._run_dir = run_dir
        self._config = config
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()
        if self._rank == 0:
            clean_up(run_dir)
        session = [secrets.token_hex(4)]
        dist.broadcast_object_list(session, src=0)
        self._session = session[0]
        self._saves = 0  # calls of `save`; every rank counts the same
        self._copies = HostCopies()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: tuple[_Save, Future[Outcome]] | None = None
        self._last: Outcome | None = None
        self._unread: list[Outcome] = []
        self._withdrawn: list[Path] = []

    def save(self, step: int, sharded_state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Save the state after `step`. Every rank calls it between the same two steps.

        Waits for an earlier save, copies this rank's shards to the host and returns; the write goes on behind.

        sharded_state: megatron-core's sharded state dict; what is not sharded in it must be equal on all ranks.
        meta: small JSON object, given back by `load`; rank 0's is written.
        """
        started = time.monotonic()
        self._saves += 1
        if not self.wait():
            self._note(SaveFailed(step, "an earlier save still hangs in the file system"))
            return
        save_id = f"{self._session}-{self._saves:04d}"
        folder = self._run_dir.checkpoint_under_way(step, save_id)
        snapshot = self._copies.take(sharded_state)
        meta = json.loads(json.dumps(meta))
        save = _Save(step, save_id, folder, snapshot, meta, started, self._config.timeout_s)
        save.blocked_s = time.monotonic() - started
        self._under_way = save, self._thread.submit(self._run, save)

    def poll(self) -> list[Outcome]:
        """Outcomes since the last call, oldest first, published or failed alike on every rank; never waits. To
        be printed by rank 0 and counted: a SaveFailed does not stop the run."""
        if self._under_way and self._under_way[1].done():
            self._finish(self._under_way[1])
        unread, self._unread = self._unread, []
        return unread

    def wait(self, *, final: bool = False) -> bool:
        """Until nothing is under way; at most until the deadline of that save plus a grace.

        Returns False where this rank's write still hangs after that. With `final`, raises CheckpointError unless
        the last save was published: call it so before the ranks leave.
        """
        if self._under_way:
            save, future = self._under_way
            left = save.started + save.timeout_s + 2 * GRACE_S - time.monotonic()
            if futures.wait([future], timeout=max(left, 0.0)).done:
                self._finish(future)
            elif not save.hang_noted:
                save.hang_noted = True
                self._note(SaveFailed(save.step, f"a write to {save.folder} hangs since {save.timeout_s:g} s"))
        if final and isinstance(self._last, SaveFailed):
            newest = find_latest(self._run_dir).step
            kept = "there is no earlier one" if newest is None else f"the newest is that of step {newest}"
            raise CheckpointError(
                f"the last checkpoint of the run, of step {self._last.step}, was not saved: {self._last.reason}; "
                f"{kept}. Free space in {self._run_dir.checkpoints} or repair it, then resume the run"
            )
        return self._under_way is None

    def _finish(self, future: Future[Outcome]) -> None:
        outcome = future.result()  # raises what is a fault of the program, not of the file system
        self._under_way = None
        self._note(outcome)

    def _note(self, outcome: Outcome) -> None:
        self._last = outcome
        self._unread.append(outcome)

    # What follows runs in the background thread.

    def _run(self, save: _Save) -> Outcome:
        try:
            save.folder.mkdir(parents=True, exist_ok=True)
            if self._rank == 0:
                return self._lead(save)
            return self._follow(save)
        except (OSError, _Abandoned) as error:
            reason = _reason(error, save.folder)
            if self._rank == 0:
                self._withdraw(save)
            else:
                self._give_up(save, reason)
            return SaveFailed(save.step, reason)

    def _lead(self, save: _Save) -> Outcome:
        part = write_part(save.folder, save.snapshot, 0, lambda: save.check("rank 0 is writing"))
        parts = [part, *self._collect(save)]
        files = {name: record for part in parts for name, record in part.files.items()}
        files[".metadata"] = write_metadata(save.folder, parts)
        for rank in range(1, self._world_size):
            _part_file(save.folder, rank).unlink()
        manifest = Manifest(save.step, save.id, self._world_size, save.meta, files)
        publish(self._run_dir, save.folder, manifest, self._config.keep)
        for folder in self._withdrawn:
            discard(folder)
        self._withdrawn.clear()
        return self._published(save, manifest)

    def _collect(self, save: _Save) -> list[Part]:
        """The parts of the other ranks, once all are written."""
        expected = {_part_file(save.folder, rank).name: rank for rank in range(1, self._world_size)}
        for _ in _looks():
            present = _names(save.folder)
            for rank in range(1, self._world_size):
                failure = _failure_file(save.folder, rank)
                if failure.name in present:
                    raise _Abandoned(f"rank {rank}: {failure.read_text(encoding='utf-8')}")
            missing = sorted(rank for name, rank in expected.items() if name not in present)
            if not missing:
                break
            save.check(f"waiting for the shards of rank {', '.join(map(str, missing))}")
        # Written by the other ranks of this run: who else can write here can change the checkpoints themselves.
        return [pickle.loads(_part_file(save.folder, rank).read_bytes()) for rank in range(1, self._world_size)]

    def _withdraw(self, save: _Save) -> None:
        """Give the space back, then tell the other ranks, by a rename that needs none."""
        if self._world_size == 1:
            discard(save.folder)
            return
        with suppress(OSError):
            _delete(save.folder.glob("__0_*"))
            save.folder.rename(save.withdrawn)
            _delete(save.withdrawn.glob("*"))
        # The empty folder stays as the sign; it goes with the next publication or start.
        self._withdrawn += [save.withdrawn, save.folder]

    def _follow(self, save: _Save) -> Outcome:
        part = write_part(save.folder, save.snapshot, self._rank, lambda: self._check_wanted(save))
        path = _part_file(save.folder, self._rank)
        unnamed = path.with_suffix(".tmp")
        unnamed.write_bytes(pickle.dumps(part))
        unnamed.rename(path)
        for _ in _looks():
            if save.folder.name not in _names(self._run_dir.checkpoints):
                self._check_wanted(save)
                # A network file system may show the old folder gone before it shows the new one.
                with suppress(CheckpointError):
                    manifest = read_manifest(self._run_dir.checkpoint(save.step))
                    if manifest.save_id == save.id:
                        return self._published(save, manifest)
            save.check("waiting for rank 0 to publish", GRACE_S)
        raise AssertionError("the looks never end")

    def _check_wanted(self, save: _Save) -> None:
        save.check(f"rank {self._rank} is writing", GRACE_S)
        if save.withdrawn.exists():
            raise _Abandoned("withdrawn by rank 0, whose log says why")

    def _give_up(self, save: _Save, reason: str) -> None:
        """Give the space back, tell rank 0, and wait until it has withdrawn the save: a rank that went on to the next
        one could meet a disk still full of this one. The note itself may need space that others have yet to free."""
        note = _failure_file(save.folder, self._rank)
        with suppress(OSError, _Abandoned):
            _delete(save.folder.glob(f"__{self._rank}_*"))
            for _ in _looks():
                present = _names(self._run_dir.checkpoints)
                if save.withdrawn.name in present:
                    # Where the folder is there too, this rank made it again after rank 0 had renamed it away.
                    shutil.rmtree(save.folder, ignore_errors=True)
                    return
                if save.folder.name not in present:
                    return
                if not note.exists():
                    with suppress(OSError):
                        unnamed = note.with_suffix(".tmp")
                        unnamed.write_text(reason, encoding="utf-8")
                        unnamed.rename(note)
                save.check("waiting for rank 0 to withdraw", GRACE_S)

    def _published(self, save: _Save, manifest: Manifest) -> Published:
        return Published(save.step, manifest.bytes, save.blocked_s, time.monotonic() - save.started)


def _part_file(folder: Path, rank: int) -> Path:
    return folder / f"part.{rank:05d}"


def _failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failed.{rank:05d}"


def _delete(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    """What a listing shows: unlike a look-up by name, it is not answered from a network file system's memory of
    names that did not exist."""
    return {path.name for path in folder.iterdir()}


def _reason(error: OSError | _Abandoned, folder: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or folder}"
    return str(error)


def _looks() -> Iterator[None]:
    """Endless ticks, further and further apart, for looking at a folder that others change."""
    pause = _SHORTEST_LOOK_S
    while True:
        yield
        time.sleep(pause)
        pause = min(pause * 1.5, _LONGEST_LOOK_S)
