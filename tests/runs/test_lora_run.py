"""A run that trains adapters: its record after an interruption, the size of its checkpoints, and other bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from loop_helpers import Attempt, lines_of, loop_recipe, prepare, reproducible
from torch.distributed.checkpoint import FileSystemReader

from megatron_rl.contract.manifest import read_manifest
from megatron_rl.contract.paths import RunDir

STEPS = 6


def recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    found = loop_recipe(
        training={"steps": STEPS}, evaluation={"every": 3}, save={"every": 2}, optimizer={"learning_rate": 1e-2}
    )
    found["model"]["lora"] = {"rank": 4, "alpha": 8.0}
    return {
        name: fields | sections.get(name, {}) if isinstance(fields, dict) else fields for name, fields in found.items()
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> RunDir:
    run_dir = prepare(tmp_path_factory.mktemp("runs") / "undisturbed", recipe())
    attempt = Attempt(run_dir, cache)
    assert attempt.exit_codes() == [0, 0], attempt.logs()
    return run_dir


def test_the_policy_starts_as_its_base_and_leaves_it(undisturbed: RunDir) -> None:
    """The base is the reference of the KL penalty."""
    kls = [line["kl"] for line in lines_of(undisturbed.metrics)]
    assert kls[0] < 0.01 < kls[-1]


def test_a_checkpoint_holds_adapters_and_their_base(undisturbed: RunDir) -> None:
    folder = undisturbed.checkpoint(STEPS)
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = [name for name in names if not name.startswith("rng")]
    assert tensors
    assert [name for name in tensors if not name.endswith((".lora_A", ".lora_B"))] == []
    meta = read_manifest(folder).meta
    assert meta["adapters"]["rank"] == 4
    assert meta["adapters"]["base"] == "init supervised"
    assert meta["initial_weights"].startswith("sum-")


def with_engine_apart(inference_tp: int, **placement: Any) -> dict[str, Any]:
    """Recipe of two training ranks with TP 2, whose engine has another layout or its own ranks."""
    nodes = 2 if placement else 1
    inference = {"tp": inference_tp, "nodes": nodes - 1 or None}
    return recipe(
        job={"nodes": nodes, "gpus_per_node": 2},
        placement={"training": {"tp": 2}, "inference": inference, **placement},
        training={"steps": 3},
    )


@pytest.mark.slow
def test_replicas_with_adapters_answer_as_the_training_ranks_would(tmp_path: Path, cache: Path) -> None:
    """The base reaches an engine of another layout once, and each replica that joins, also after a kill."""
    alone = Attempt(prepare(tmp_path / "alone", with_engine_apart(1)), cache)
    assert alone.exit_codes() == [0, 0], alone.logs()
    apart = Attempt(prepare(tmp_path / "apart", with_engine_apart(1, mode="partitioned")), cache)
    (first,) = apart.start_replica(0)
    apart.wait_for_step(1)
    first.kill()
    apart.start_replica(0, start=1)
    assert apart.exit_codes() == [0, 0], apart.logs()
    assert reproducible(apart.run_dir) == reproducible(alone.run_dir)
