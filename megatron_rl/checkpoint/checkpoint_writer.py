"""Writing one checkpoint from host memory to its published folder, in a thread beside the training loop.

The thread runs no collective, so it cannot disturb those of the loop. Each rank writes its shards into a folder
`step-N.ID.tmp` and notifies rank 0 by a file in it:

    rank 0                                      rank k
    writes its shards                           writes its shards
    waits for part.k of every k                 renames part.k into place (or failed.k)
    metadata, manifest, rename to step-N        waits until the folder is gone: step-N has its ID = published
                                                (saved.json in it has 100 bytes)

From the rename of part.k on, rank 0 may publish at any moment. So rank k then deletes nothing, whatever error it meets,
unless the save was withdrawn.

If a save fails or is given up on any rank, rank 0 withdraws it: it renames the folder away, so that ranks still writing
notice, and empties it. An incomplete save never touches the previous checkpoints or `latest`.
"""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from megatron_rl.checkpoint.publish import SaveFailed, SaveOutcome, discard, publish
from megatron_rl.checkpoint.shards import METADATA, Abandoned, Snapshot, WrittenPart, write_metadata, write_part
from megatron_rl.contract.files import until_written
from megatron_rl.contract.manifest import Manifest, read_saved
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save_section import SaveConfig

GRACE_S = 10.0
"""Seconds after a save's deadline, when rank 0 ends it, that the other ranks wait for the verdict. The training loop
waits as long again for its own thread."""
_SHORTEST_POLL_S = 0.005
_LONGEST_POLL_S = 0.5
_LISTINGS = 2048
"""Most listings of a folder that all ranks together ask for in a second."""
_THREADS = 16
"""Threads in which rank 0 reads or deletes files of other ranks."""
_NAMED = 8
"""Most ranks that a message names."""
WITHDRAWN = "rank 0 withdrew the save; see its log for the reason"
Value = TypeVar("Value")


@dataclass
class SaveInProgress:
    """One save on this rank. The training loop creates it and may give it up; the writer's thread executes it."""

    step: int
    id: str
    folder: Path
    snapshot: Snapshot
    meta: dict[str, Any]
    started: float
    timeout_s: float
    needed: Callable[[], None] | None  # argument of `Checkpointer.save`
    blocked_s: float = 0.0
    hang_noted: bool = False
    given_up: str | None = None  # why; None: it was not

    @property
    def withdrawn(self) -> Path:
        return self.folder.with_name(f"{self.folder.stem}.withdrawn.tmp")

    @property
    def hopeless_at(self) -> float:
        """Time (time.monotonic()) from which the training loop no longer waits for the thread."""
        return self.started + self.timeout_s + 2 * GRACE_S

    def check(self, waiting_for: str, grace_s: float = 0.0) -> None:
        """Raise Abandoned if the save was given up or is past its deadline, or if the training loop has ended without
        waiting."""
        if self.given_up is not None:
            raise Abandoned(f"given up: {self.given_up}")
        self.check_time(waiting_for, grace_s)

    def check_time(self, waiting_for: str, grace_s: float = 0.0) -> None:
        if time.monotonic() > self.started + self.timeout_s + grace_s:
            raise Abandoned(f"not done within save.timeout_s = {self.timeout_s:g} s: {waiting_for}")
        if not threading.main_thread().is_alive():
            raise Abandoned(f"the process ends: {waiting_for}")


class CheckpointWriter:
    def __init__(self, run_dir: RunDir, config: SaveConfig, rank: int, world_size: int) -> None:
        self._run_dir = run_dir
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._withdrawn: list[Path] = []
        self.parent: int | None = None  # step of the previous checkpoint in this line of training; used on rank 0

    def run(self, save: SaveInProgress) -> SaveOutcome:
        try:
            save.folder.mkdir(parents=True, exist_ok=True)
            if save.needed is not None:
                save.needed()
            if self._rank == 0:
                return self._lead(save)
            self._offer(save)
        except (OSError, Abandoned) as error:
            reason = _reason(error, save.folder)
            if self._rank == 0:
                self._withdraw(save)
            else:
                self._give_up(save, reason)
            return SaveFailed(save.step, reason)
        return self._verdict(save)

    def _lead(self, save: SaveInProgress) -> SaveOutcome:
        part = write_part(save.folder, save.snapshot, 0, lambda: save.check("rank 0 is writing"))
        parts = [part, *self._collect(save)]
        files = {name: record for part in parts for name, record in part.files.items()}
        files[METADATA] = write_metadata(save.folder, parts, lambda: save.check("rank 0 is writing the index"))
        _at_once(Path.unlink, [save.folder / _part(rank) for rank in range(1, self._world_size)])
        total_s = time.monotonic() - save.started
        manifest = Manifest(
            save.step, save.id, self._world_size, self.parent, save.blocked_s, total_s, save.meta, files
        )
        save.check("rank 0 is about to publish")
        publish(self._run_dir, save.folder, manifest, self._config)
        self.parent = save.step
        for folder in self._withdrawn:
            discard(folder)
        self._withdrawn.clear()
        return manifest.saved

    def _collect(self, save: SaveInProgress) -> list[WrittenPart]:
        expected = {_part(rank): rank for rank in range(1, self._world_size)}
        failures = {_failure(rank): rank for rank in range(1, self._world_size)}
        for _ in self._polls():
            present = _names(save.folder)
            for name in sorted(failures.keys() & present):
                raise Abandoned(f"rank {failures[name]}: {(save.folder / name).read_text(encoding='utf-8')}")
            missing = [expected[name] for name in sorted(expected.keys() - present)]
            if not missing:
                break
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            save.check(f"waiting for the shards of rank {', '.join(map(str, missing[:_NAMED]))}{more}")
        return _at_once(_read_part, [save.folder / name for name in expected])

    def _withdraw(self, save: SaveInProgress) -> None:
        if self._world_size == 1:
            discard(save.folder)
            return
        with suppress(OSError):
            _delete(save.folder.glob("__0_*"))
        with suppress(OSError):
            until_written(save.withdrawn, lambda: save.folder.rename(save.withdrawn), GRACE_S)
        with suppress(OSError):
            save.withdrawn.mkdir(exist_ok=True)  # which the others look for, also where there was nothing to rename
            _delete(save.withdrawn.glob("*"))
        # The empty folder remains as the notification until the next publication or start.
        self._withdrawn += [save.withdrawn, save.folder]

    def _offer(self, save: SaveInProgress) -> None:
        """Write this rank's shards and notify rank 0. Raises OSError or Abandoned only if rank 0 never sees the
        notification."""
        part = write_part(save.folder, save.snapshot, self._rank, lambda: self._check_wanted(save))
        target = save.folder / _part(self._rank)
        unnamed = _write_unnamed(target, pickle.dumps(part))
        try:
            unnamed.rename(target)
        except OSError:
            # A network file system may report an error of a rename that it has done, or does later. It cannot do it any
            # more once the file is deleted under its first name.
            try:
                unnamed.unlink()
            except OSError:
                return
            raise

    # Once its shards are there, a rank may not give up by itself, or the ranks could disagree whether a checkpoint
    # exists. Say that rank 3 reaches the deadline while rank 0 renames the folder: had it given up, it would report a
    # failure, and all others a checkpoint. So it waits GRACE_S longer than rank 0 does, and takes what it finds: step-N
    # with the id of this save means published, a withdrawn folder means failed.
    def _verdict(self, save: SaveInProgress) -> SaveOutcome:
        try:
            for _ in self._polls():
                with suppress(OSError):  # which says nothing about the save
                    present = _names(self._run_dir.checkpoints)
                    if self._withdrawn_in(present, save):
                        return SaveFailed(save.step, WITHDRAWN)
                    # A network file system may hide the old folder before it shows the new one.
                    if save.folder.name not in present:
                        saved = read_saved(self._run_dir.checkpoint(save.step))
                        if saved is not None and saved.save_id == save.id:
                            return saved
                # Do not check whether this rank gave up: from here on rank 0 decides, and may have published.
                save.check_time("waiting for rank 0 to publish", GRACE_S)
        except Abandoned as error:
            return SaveFailed(save.step, str(error))
        raise AssertionError("polling never ends")

    def _check_wanted(self, save: SaveInProgress) -> None:
        save.check(f"rank {self._rank} is writing", GRACE_S)
        if save.withdrawn.exists():
            raise Abandoned(WITHDRAWN)

    def _withdrawn_in(self, present: set[str], save: SaveInProgress) -> bool:
        """Whether a listing shows that rank 0 withdrew the save."""
        if save.withdrawn.name not in present:
            return False
        # If the folder exists too, this rank created it again after rank 0 had renamed it away.
        shutil.rmtree(save.folder, ignore_errors=True)
        return True

    def _give_up(self, save: SaveInProgress, reason: str) -> None:
        """Free the space, notify rank 0, and wait until it has withdrawn the save: otherwise the next save could find
        the disk still full. The note itself may need space that others have yet to free. Only for a rank whose part
        rank 0 never sees."""
        note = save.folder / _failure(self._rank)
        with suppress(OSError):
            _delete(save.folder.glob(f"__{self._rank}_*"))
        with suppress(Abandoned):
            for _ in self._polls():
                with suppress(OSError):
                    present = _names(self._run_dir.checkpoints)
                    if self._withdrawn_in(present, save) or save.folder.name not in present:
                        return
                    if not note.exists():
                        _write_unnamed(note, reason.encode()).rename(note)
                save.check_time("waiting for rank 0 to withdraw", GRACE_S)

    def _polls(self) -> Iterator[None]:
        """Endless ticks at growing intervals, for polling a folder that other ranks change. They grow with the number
        of ranks, or these would keep the file system from its work."""
        pause, longest = _SHORTEST_POLL_S, max(_LONGEST_POLL_S, self._world_size / _LISTINGS)
        while True:
            yield
            time.sleep(pause)
            pause = min(pause * 1.5, longest)


def _part(rank: int) -> str:
    return f"part.{rank:05d}"


def _failure(rank: int) -> str:
    return f"failed.{rank:05d}"


def _read_part(file: Path) -> WrittenPart:
    from megatron_rl.checkpoint.plain_pickle import read_plain  # slow to import, and a run trains before it saves

    with file.open("rb") as content:
        part: WrittenPart = read_plain(content)
    return part


def _at_once(work: Callable[[Path], Value], files: Sequence[Path]) -> list[Value]:
    """Apply a function to many files. On a network file system, it mostly waits."""
    size = -(-len(files) // _THREADS) or 1
    shares = [files[first : first + size] for first in range(0, len(files), size)]
    with ThreadPoolExecutor(_THREADS) as pool:
        return [*chain.from_iterable(pool.map(lambda share: [work(file) for file in share], shares))]


def _write_unnamed(path: Path, content: bytes) -> Path:
    """Write a file that gets its name by a rename, so that other ranks see it whole or not at all. It is temporary, so
    it need not be durable."""
    unnamed = path.with_name(f"{path.name}.tmp")
    unnamed.write_bytes(content)
    return unnamed


def _delete(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _names(folder: Path) -> set[str]:
    """Names in a listing. Unlike a look-up by name, a listing is not answered from a network file system's cache of
    missing names."""
    return {path.name for path in folder.iterdir()}


def _reason(error: OSError | Abandoned, folder: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}: {error.filename or folder}"
    return str(error)
