"""The folder from which an inference server outside the run reads its weights: the trainer's tensors, whole, by their
Hugging Face names, whatever layout holds them.

    FOLDER/version-000012/    safetensors, configuration and tokenizer, as published models have them
    FOLDER/current            -> version-000012; the server is started on it: vllm serve FOLDER/current

FOLDER is in shared memory (/dev/shm/...) if server and trainer share a node, else on the shared file system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import INDEX, POLICY_VERSION
from megatron_rl.checkpoint.hf.staging import carry
from megatron_rl.errors import ConfigurationError
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_mapping import OUTPUT, pieces
from megatron_rl.model.hf_parts import Held, held_weights
from megatron_rl.model.policy import Policy

SHARD_BYTES = 1 << 30
_VERSION = re.compile(r"version-\d{6}")


class ReloadFailed(RuntimeError):
    """A server refused new weights, or they could not be written."""


class ServerAway(ReloadFailed):
    """A server is unreachable: it has not started yet, or is gone. It reads the version `current` when it starts."""


def version_folder(folder: Path, version: int) -> Path:
    return folder / f"version-{version:06d}"


@dataclass(frozen=True, slots=True)
class ServedFolder:
    folder: Path
    published: Path
    """A published model, or a folder like one, whose configuration and tokenizer are copied into each version."""
    shard_bytes: int = SHARD_BYTES

    @property
    def current(self) -> Path:
        """Link on which the server is started."""
        return self.folder / "current"

    def version(self, version: int) -> Path:
        return version_folder(self.folder, version)

    def own(self) -> None:
        """Create the folder, or check that only this user can write to it: anyone may create a folder in /dev/shm, and
        its owner decides what the server reads. Raises ConfigurationError and OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise ConfigurationError(f"{self.folder} is a link: name the folder that it points to")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{self.folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: weights are "
                "only written to a folder that belongs to you and that nobody else can write to; name another one, or "
                "run chmod 700"
            )

    def write(self, into: Path, writer: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write one rank's tensors to files of its own. Returns the file of each tensor. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # an extra of mrl

        files: dict[str, str] = {}
        for number, bucket in enumerate(_buckets(tensors, self.shard_bytes)):
            file = f"model-{writer:05d}-{number:05d}.safetensors"
            try:
                save_file(bucket, into / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{into / file} cannot be written: {error}") from error
            files |= dict.fromkeys(bucket, file)
        return files

    def describe(self, into: Path, files: dict[str, str], version: int) -> None:
        """Write the index, configuration and tokenizer beside the tensors."""
        carry(self.published, into)
        size = sum((into / file).stat().st_size for file in set(files.values()))
        metadata = {"total_size": size, POLICY_VERSION: version}
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        (into / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def pointing(self, version: int) -> Iterator[None]:
        """Point `current` to a version, and back to the one before if the server refuses it in the `with` block. A
        server that restarts therefore has the weights that the trainer expects."""
        before = self.current.readlink() if self.current.is_symlink() else None
        self._point(Path(self.version(version).name))
        try:
            yield
        except ServerAway:
            raise
        except BaseException:
            self._point(before)
            raise

    def _point(self, target: Path | None) -> None:
        """Replace the link atomically, or remove it."""
        if target is None:
            self.current.unlink(missing_ok=True)
            return
        link = self.folder / ".current.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(self.current)

    def delete_others(self, version: int) -> None:
        """Delete all versions except this one."""
        for path in self.folder.iterdir():
            if _VERSION.fullmatch(path.name) and path != self.version(version):
                shutil.rmtree(path, ignore_errors=True)


def whole_tensors(policy: Policy, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of this rank's pipeline stage and experts, whole, on the first of the ranks that hold its parts.
    Every tensor comes once among all ranks, and one weight at a time is in memory twice.

    Collective over tensor-parallel ranks: each must exhaust the iterator, even where it yields nothing.
    """
    for held in published_weights(policy, model):
        parts = _gather(held)
        if held.ranks.rank() > 0:
            continue
        whole = {source.name: held.tensor.new_empty(source.shape) for source in held.weight.sources}
        for rank, part in enumerate(parts):
            for piece in pieces(held.weight, part, rank, len(parts)):
                place = whole[piece.source.name][piece.index]
                place.copy_(piece.view.reshape(place.shape))
        yield from whole.items()


def published_weights(policy: Policy, model: ModelConfig) -> list[Held]:
    """This rank's weights without those that another data-parallel copy publishes, and without an output layer that is
    tied to the embedding."""
    return [
        held
        for held in held_weights(policy, model)
        if held.copies.rank() == 0 and not (held.name == OUTPUT and model.tied_embeddings)
    ]


def _gather(held: Held) -> list[Tensor]:
    """Parts of all ranks, merged with their adapters, on the first of them; one part if each rank has the whole
    weight."""
    ranks = held.ranks.size()
    if held.weight.split is None or ranks == 1:
        return [held.effective()]
    own = held.effective().contiguous()
    parts = [torch.empty_like(own) for _ in range(ranks)] if held.ranks.rank() == 0 else None
    dist.gather(own, parts, group=held.ranks, group_dst=0)
    return parts or []


def _buckets(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors, on the CPU, in groups of at most `limit` bytes; a larger tensor is a group by itself."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.cpu().contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket
