"""Small runs that each release has begun, and their packed directories beside this file.

VERSION.tar.xz     runs/CASE/                  run directory, as Ctrl-C left it in the middle
                   undisturbed/CASE/           metrics.jsonl and evaluations.jsonl of the same run without Ctrl-C
                   recorded.json               versions of the packages that computed them
VERSION.keys.json  keys of recipes, with their defaults
"""

from __future__ import annotations

import json
import os
import platform
import tarfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
CHANGELOG = HERE.parents[1] / "CHANGELOG.md"
OLDER_KERNELS = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
"""Variables that make every x86 processor compute the same bits."""
STEPS, SAVED_EVERY, STOPPED_AFTER = 10, 3, 5
TINY = (
    *("model.num_layers=1", "model.hidden_size=8", "model.ffn_hidden_size=16", "model.num_attention_heads=2"),
    *("model.num_query_groups=1", "job.gpus_per_node=1", "save.keep=1", f"save.every={SAVED_EVERY}"),
    *(f"training.steps={STEPS}", "optimizer.warmup_steps=2", "evaluation.every=4", "logging.samples_every=1"),
)
SAMPLED = (
    *(*TINY, "model.supervised.steps=400", "model.supervised.learning_rate=1e-2"),  # so that some answers are right
    *("grpo.prompts_per_step=8", "grpo.group_size=4", "grpo.kl_beta=0.01"),
)
ENVIRONMENTS = "[{name: arithmetic, id: sums, weight: 2.0}, {name: arithmetic, id: longer, args: {max_terms: 3}}]"
CASES: Mapping[str, tuple[str, ...]] = {
    "colocated": ("demo", *SAMPLED, "job.gpus_per_node=2"),
    "partitioned": (
        *("demo", *SAMPLED, "job.nodes=2", "placement.mode=partitioned", "placement.inference.nodes=1"),
        *("async.max_lag=1", "resume.partial=keep"),
    ),
    "supervised": ("demo-supervised", *TINY, "data.examples_per_step=8"),
    "lora": ("demo", *SAMPLED, "model.lora={rank: 2, alpha: 4.0}"),
    "environments": ("demo", *SAMPLED, "environment=null", f"environments={ENVIRONMENTS}"),
}
"""Recipe and overrides of each run."""
WITHOUT_BITS = frozenset({"partitioned"})
"""Runs whose record is not the same each time, because generation is ahead of training."""
RELEASES = tuple(sorted(path.name.removesuffix(".tar.xz") for path in HERE.glob("v*.tar.xz")))


def packages() -> dict[str, str]:
    """Return what bits depend on."""
    found = {name: version(name) for name in ("torch", "megatron-core", "numpy")}
    return {**found, "machine": platform.machine()}


def unpack(release: str, case: str, folder: Path) -> tuple[Path, Path]:
    """Unpack a run into `folder`; return its directory, and that of its undisturbed record."""
    with tarfile.open(HERE / f"{release}.tar.xz") as archive:
        wanted = [one for one in archive if case in one.name.split("/")]
        archive.extractall(folder, wanted, filter="data")
    root = folder / "runs" / case
    identity = root / "run.json"
    here = {"path": str(root), "inode": root.stat().st_ino}  # elsewhere it would be a copy, which is another run
    identity.write_text(json.dumps(json.loads(identity.read_text()) | here))
    return root, folder / "undisturbed" / case


def has_same_bits(release: str) -> bool:
    """Whether this machine computes the bits that were recorded."""
    with tarfile.open(HERE / f"{release}.tar.xz") as archive:
        member = archive.extractfile("recorded.json")
        assert member is not None
        return bool(json.load(member) == packages())


def environment(folder: Path) -> dict[str, str]:
    """Variables for the commands of a run; they keep nothing outside `folder`."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("MRL_", "PYTHON"))},
        **OLDER_KERNELS,
        "OMP_NUM_THREADS": "1",
        "MRL_CLUSTERS": "",
        "MRL_CACHE": str(folder / "cache"),
        "XDG_STATE_HOME": str(folder / "state"),
    }
