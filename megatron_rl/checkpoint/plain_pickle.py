"""Pickles that hold data alone.

A pickle may name any function of any module, and calls it while it is read. A checkpoint may come from anyone, so only
the types that a checkpoint consists of are found here, and every other name is refused.
"""

from __future__ import annotations

import pickle
import re
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.checkpoint.shards import WrittenPart
from megatron_rl.checkpoint.stored_index import IndexPart, TensorPart
from megatron_rl.contract.manifest import FileRecord

_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    FileRecord,
    IndexPart,
    TensorPart,
    WrittenPart,
)
_KNOWN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # finds a layout by its name
    **{(found.__module__, found.__qualname__): found for found in _CLASSES},
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise pickle.UnpicklingError(_refusal(f"{module}.{name}"))
        return found


def read_plain(file: BinaryIO) -> Any:
    """Read a pickle of the types that the index of a checkpoint consists of. Raises OSError, pickle.UnpicklingError for
    any other name, and anything else where the file is damaged."""
    return _PlainUnpickler(file).load()


def reason(error: pickle.UnpicklingError) -> str:
    """Return why a pickle was refused, in one line. torch writes a page, with advice to open it all the same."""
    name = _REFUSED_BY_TORCH.search(str(error))
    if name:
        return _refusal(name[1])
    return "it is damaged, or holds more than data" if "\n" in str(error) else str(error)


_REFUSED_BY_TORCH = re.compile(r"\b(?:GLOBAL|class|function) ([\w.]*\w)")


def _refusal(name: str) -> str:
    return f"it names {name}, which no checkpoint of mrl does: that could run a program as you, so it was not opened"
