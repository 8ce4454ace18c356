"""megatron-core's `torch_dist` format, written by each process alone: no collective, no helper process.

megatron-core's own save plans with collectives and has forked processes write the files and return their results
through a multiprocessing Manager. The first save of a process pays for that (megatron-core 0.16.1, 3 MB, 3.1 s in all):
2.0 s until the spawned Manager has imported the main module and torch again, 0.9 s until it has imported what it needs
to unpickle the first result. Every later save still forks and joins a process per file, 0.15 s. Here each rank writes
one file and returns what is where (`WrittenPart`); a process with all parts can write `.metadata`. The result loads
with `dist_checkpointing.load` into any layout.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor

from megatron_rl.checkpoint.stored_index import IndexPart, StoredItem, index_part, joined, shape_in_whole
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.manifest import FileRecord, hash_file

METADATA = ".metadata"
_CHUNK_BYTES = 16 << 20  # bytes written between two checks whether the save was given up


class Abandoned(Exception):
    """The save will not be completed. The message says why."""


@dataclass(frozen=True)
class Snapshot:
    """State that this rank saves, in host memory that the next training step does not change."""

    shards: dict[str, list[ShardedBase]]  # key -> tensors and objects whose main replica is on this rank
    common: dict[str, Any]  # unsharded state, equal on every rank; rank 0 writes it


@dataclass(frozen=True)
class WrittenPart:
    """Description of one rank's file, which rank 0 needs for the metadata and the manifest."""

    index: IndexPart
    files: dict[str, FileRecord]


# The loop stops only while the shards are copied to the host, so the copy must be fast: from the device into pinned
# memory, which is slow to allocate and is therefore kept. A checkpoint of 20 GB on a rank costs 20 GB of host memory
# for the whole run. The buffers are overwritten by the next snapshot, which is why `Checkpointer.save` first waits for
# the thread that still writes from them.
class HostCopies:
    """Copies tensors into host memory that is reused by the next snapshot, pinned for tensors of a device. A snapshot
    is valid only until the next one."""

    def __init__(self) -> None:
        self._buffers: dict[object, Tensor] = {}

    def take(self, sharded_state: dict[str, Any]) -> Snapshot:
        """Take a snapshot of a megatron-core sharded state dict. Expands its factories in place, as
        `dist_checkpointing.save` does. Blocks for the copy, but needs no other rank: overlapping or missing shards are
        found when the parts are assembled."""
        sharded, common = save_preprocess(sharded_state, validate_access_integrity=False)
        shards: dict[str, list[ShardedBase]] = defaultdict(list)
        on_device = False
        for item in nested_values(sharded):
            if not is_main_replica(item.replica_id):
                continue
            taken = copy.copy(item)
            if isinstance(item, ShardedTensor):
                taken.data = self._copy((item.key, item.global_offset), item.data)
                on_device |= item.data.device.type != "cpu"
                shards[item.key].append(taken)
            else:
                taken.data = _copy_nested(item.data)
                shards[item.unique_key].append(taken)
        if on_device:
            torch.accelerator.synchronize()
        return Snapshot(dict(shards), _copy_nested(common))

    def _copy(self, name: object, tensor: Tensor) -> Tensor:
        source = tensor.detach()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != source.shape or buffer.dtype != source.dtype:
            pinned = source.device.type != "cpu"
            buffer = self._buffers[name] = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
        return buffer.copy_(source, non_blocking=True)


def _copy_nested(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_nested(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy_nested(item) for item in value)
    return copy.deepcopy(value)


def write_part(folder: Path, snapshot: Snapshot, rank: int, check: Callable[[], None]) -> WrittenPart:
    """Write and fsync this rank's file, and rank 0's common ones.

    `check` runs before each tensor and within large ones; it ends the write by raising Abandoned. Raises OSError, for
    example on a full disk."""
    files: dict[str, FileRecord] = {}
    stored = []
    name = f"__{rank}_0.distcp"
    if snapshot.shards:
        with RecordedFile(folder / name, check) as file:
            for item in chain.from_iterable(snapshot.shards.values()):
                check()
                start = file.position
                if isinstance(item, ShardedTensor):
                    file.save(item.data.detach().view(shape_in_whole(item)))
                else:
                    file.save([item.data])  # a list, because megatron-core reads one
                stored.append(StoredItem(item, start, file.position - start))
        files[name] = file.record
    if rank == 0:
        with RecordedFile(folder / COMMON_STATE_FNAME, check) as file:
            file.save(snapshot.common)
        files[COMMON_STATE_FNAME] = file.record
        write_atomic(folder / CONFIG_FNAME, json.dumps(asdict(CheckpointingConfig("torch_dist"))))
        files[CONFIG_FNAME] = hash_file(folder / CONFIG_FNAME)
    return WrittenPart(index_part(name, stored), files)


def write_metadata(folder: Path, parts: Sequence[WrittenPart], check: Callable[[], None]) -> FileRecord:
    """Write and fsync torch's index of all parts, in the order of their ranks.

    Raises ValueError if the shards of all ranks overlap or have a gap: the sharded state dict was wrong. Otherwise as
    `write_part`.
    """
    with RecordedFile(folder / METADATA, check) as file:
        for piece in joined([part.index for part in parts]):
            check()
            file.write(piece)
    return file.record


class RecordedFile:
    """A new file that counts and hashes what is written, and is fsynced when closed."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        self._path = path
        self._check = check
        self._hash = hashlib.sha256()
        self._failure: OSError | Abandoned | None = None
        self.position = 0

    def __enter__(self) -> RecordedFile:
        self._file: BinaryIO = self._path.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    @property
    def record(self) -> FileRecord:
        return FileRecord(self.position, self._hash.hexdigest())

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, view.nbytes, _CHUNK_BYTES):
                if start:
                    self._check()
                self._file.write(view[start : start + _CHUNK_BYTES])
                self._hash.update(view[start : start + _CHUNK_BYTES])
        except (OSError, Abandoned) as error:
            self._failure = error
            raise
        self.position += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Do nothing: torch.save flushes after each object, but buffering is faster."""

    def save(self, value: Any) -> None:
        try:
            torch.save(value, cast(BinaryIO, self))
        except RuntimeError:
            # torch's zip writer turns a failed write into a RuntimeError without errno.
            if self._failure is None:
                raise
            raise self._failure from None
