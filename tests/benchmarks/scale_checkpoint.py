"""Costs of a checkpoint's index, publication and verification, by ranks."""

from __future__ import annotations

import gc
import pickle
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from scale_rows import Cost, Row, cpu_seconds

from megatron_rl.checkpoint.checkpoint_writer import CheckpointWriter, SaveInProgress
from megatron_rl.checkpoint.shards import METADATA, Snapshot, WrittenPart, write_metadata
from megatron_rl.checkpoint.stored_index import IndexPart, StoredItem, index_part
from megatron_rl.checkpoint.stored_shards import StoredShards
from megatron_rl.contract.manifest import CheckpointSaved, FileRecord, Manifest, find_defect, write_manifest
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.save_section import SaveConfig

PIECES, NAMES = 1000, 40
"""Tensors, or boxes of them, that a rank writes, and names among them. The largest shipped recipe has 440 to 1,300 on
64 GPUs, and fewer on more."""
BOX = (1, 640, 5120)
BYTES = 131_072  # of a piece in the file


def stored(pieces: int, rank: int, ranks: int) -> list[StoredItem]:
    """Tensors of one rank: its rows of each layer, in tensors that stack the layers."""
    data, size = torch.empty(1).expand(BOX), (-(-pieces // NAMES), ranks * BOX[1], BOX[2])
    found = []
    for piece in range(pieces):
        name = f"optimizer.state.exp_avg_sq.decoder.layers.self_attention.linear_{piece % NAMES}.weight"
        offset = (piece // NAMES, rank * BOX[1], 0)
        found.append(StoredItem(ShardedTensor(name, data, data.dtype, BOX, size, offset, None), piece * BYTES, BYTES))
    return found


def part(rank: int, ranks: int) -> IndexPart:
    return index_part(f"__{rank}_0.distcp", stored(PIECES, rank, ranks))


def with_elements(found: IndexPart, whole: IndexPart | None) -> IndexPart:
    """Let a part be one that, by its sums, has all elements of each tensor or none."""
    tensors = {
        name: each._replace(elements=whole.tensors[name].elements if whole else 0)
        for name, each in found.tensors.items()
    }
    return replace(found, tensors=tensors)


def whole_tensors(ranks: int) -> IndexPart:
    tensors = []
    for one in stored(NAMES, 0, ranks):
        item = one.item
        assert isinstance(item, ShardedTensor)
        size = (PIECES // NAMES, *item.global_shape[1:])
        data = torch.empty(1).expand(size)
        tensors.append(StoredItem(ShardedTensor(item.key, data, data.dtype, size, size, (0, 0, 0), None), 0, BYTES))
    return index_part("", tensors)


def own_part(pieces: int) -> Cost:
    items = stored(pieces, 0, 8)
    described = index_part("__0_0.distcp", items)
    size = len(described.places) + sum(len(tensor.boxes) for tensor in described.tensors.values())
    return Cost(cpu_seconds(lambda: index_part("__0_0.distcp", items)), size)


def publication(ranks: int) -> Cost:
    """Rank 0's thread from the parts of all ranks to the published checkpoint, except for its own tensors."""
    with tempfile.TemporaryDirectory() as root:
        run = RunDir(Path(root))
        folder = run.unfinished_checkpoint(40, "a-0001")
        folder.mkdir(parents=True)
        found = part(ranks - 1, ranks)
        first, others = with_elements(found, whole_tensors(ranks)), with_elements(found, None)
        for rank in range(1, ranks):
            files = {f"__{rank}_0.distcp": FileRecord(PIECES * BYTES, "0" * 64)}
            index = first if rank == 1 else others
            (folder / f"part.{rank:05d}").write_bytes(pickle.dumps(WrittenPart(index, files)))
        save = SaveInProgress(40, "a-0001", folder, Snapshot({}, {}), {}, time.monotonic(), 3600.0, None)
        writer = CheckpointWriter(run, SaveConfig(), 0, ranks)
        gc.collect()
        gc.freeze()  # as a rank does after its imports
        began = time.process_time()
        outcome = writer.run(save)
        spent = time.process_time() - began
        assert isinstance(outcome, CheckpointSaved), outcome
        return Cost(spent, (run.checkpoint(40) / METADATA).stat().st_size)


def verification(files: int) -> Cost:
    """Check that a start, a save and `mrl` commands make: the manifest, and the sizes of all files."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        names = [f"__{rank}_0.distcp" for rank in range(files)]
        for name in names:
            (folder / name).touch()
        records = {name: FileRecord(0, "0" * 64) for name in names}
        write_manifest(folder, Manifest(40, "a-0001", files, None, 0.0, 0.0, {}, records))
        assert find_defect(folder) is None
        return Cost(cpu_seconds(lambda: find_defect(folder)), (folder / "manifest.json").stat().st_size)


def reading(ranks: int) -> Cost:
    """A rank that resumes reads the index of all."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        record = write_metadata(folder, [WrittenPart(part(rank, ranks), {}) for rank in range(ranks)], lambda: None)
        return Cost(cpu_seconds(lambda: StoredShards(folder), 1), record.bytes)


ROWS = [
    Row("checkpoint: a rank describes its tensors", "tensors", (100, 300, 1000, 3000), 1000, own_part, limit_s=0.1),
    Row(
        "checkpoint: rank 0 joins the index and publishes, 1,000 tensors a rank",
        "ranks",
        (256, 512, 1024, 2048),
        16384,
        publication,
        limit_s=5.0,
    ),
    Row(
        "checkpoint: names and sizes of all files", "files", (512, 2048, 8192, 16384), 16384, verification, limit_s=5.0
    ),
    Row("checkpoint: a resumed rank reads the index, 1,000 tensors a rank", "ranks", (16, 32, 64, 128), 16384, reading),
]
