"""The weight transfer engine in vLLM's workers, with stand-ins for vLLM's modules and for streams of a GPU."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from core_helpers import tiny_model

from megatron_rl.generate.refit.plan import ModelStage
from megatron_rl.generate.vllm.share import WeightShare

LAYERS = {2: [(0, 2), (2, 3)], 3: [(0, 1), (1, 2), (2, 3)]}
"""Layers of each stage, of a model with three, by the number of stages."""

Init, Update = TypeVar("Init"), TypeVar("Update")


class WeightTransferEngine(Generic[Init, Update]):
    """vLLM's base class."""

    parallel_config = SimpleNamespace(data_parallel_size=1, enable_expert_parallel=False)

    def __init__(self, device: torch.device) -> None:
        self.device = device


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """weight_engine beside modules that look like vLLM's."""
    base = {"WeightTransferInitInfo": object, "WeightTransferUpdateInfo": object}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            f"get_{name}_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1)
            for name in ("ep", "pp", "tp", "world")
        },
        "vllm.distributed.utils": {"get_pp_indices": lambda layers, rank, size: LAYERS[size][rank]},
        "vllm.distributed.weight_transfer": {},
        "vllm.distributed.weight_transfer.base": {**base, "WeightTransferEngine": WeightTransferEngine},
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "finalize_layerwise_reload": None,
            "initialize_layerwise_reload": None,
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "megatron_rl.generate.vllm.weight_engine", raising=False)
    yield importlib.import_module("megatron_rl.generate.vllm.weight_engine")
    monkeypatch.delitem(sys.modules, "megatron_rl.generate.vllm.weight_engine")


def test_a_worker_joins_and_receives_on_its_own_gpu(engine_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA uses the first GPU of the process in a thread that selects none, and each worker sees those of all."""
    selected = threading.local()  # as the CUDA runtime has it

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        selected.device = stream.device
        yield

    made = lambda device: SimpleNamespace(device=device, synchronize=lambda: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Stream", made)
    monkeypatch.setattr(torch.cuda, "stream", on)
    seen = []
    monkeypatch.setattr(WeightShare, "_receive", lambda *_: seen.append(getattr(selected, "device", "the first")))

    engine = engine_module.MrlWeightTransferEngine(torch.device("cuda", 3))
    setting = {"replica": 0, "start": 0, "timeout_s": 9.0, "vocabulary": 61}
    setting["model"] = tiny_model().model_dump(mode="json")
    epoch = {"number": 1, "host": "h", "port": 1, "secret": "s", "training_ranks": 1, "replicas": [[0, 0, 1, "gloo"]]}
    engine.init_transfer_engine(engine_module.Version(1, epoch, setting))
    engine.init_transfer_engine(engine_module.Version(2, None, setting))
    engine._share._newest.result(9)
    assert seen == [torch.device("cuda", 3)] * 2


GROUPS = {"tp": (1, 2), "pp": (1, 2), "ep": (3, 4), "world": (7, 8)}
"""Rank and size of each group of a worker of tp 2, pp 2, dp 2: the second replica, its last stage."""


@pytest.mark.parametrize(("dp", "split", "rank", "size"), [(1, False, 1, 2), (2, False, 3, 4), (2, True, 3, 4)])
def test_a_worker_exchanges_weights_with_those_of_its_stage_in_all_data_parallel_replicas(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch, dp: int, split: bool, rank: int, size: int
) -> None:
    for name, (own, count) in GROUPS.items():
        group = SimpleNamespace(rank_in_group=own, world_size=count)
        monkeypatch.setattr(engine_module, f"get_{name}_group", lambda group=group: group)
    parallel = SimpleNamespace(data_parallel_size=dp, enable_expert_parallel=split)
    workers = engine_module._StageWorkers(tiny_model(num_layers=3), parallel)
    assert (workers.rank, workers.size, workers.member, workers.own_experts) == (rank, size, 7, split)
    assert workers.stage == ModelStage(2, 3, embedding=tiny_model().tied_embeddings, output=True)


@pytest.mark.parametrize(
    ("stage", "tied", "expected"),
    [
        (0, True, ModelStage(0, 1, embedding=True, output=False)),
        (1, True, ModelStage(1, 2, embedding=False, output=False)),
        (2, True, ModelStage(2, 3, embedding=True, output=True)),
        (2, False, ModelStage(2, 3, embedding=False, output=True)),
    ],
)
def test_a_stage_has_the_ends_of_the_model_that_vllm_builds_there(
    engine_module: Any, monkeypatch: pytest.MonkeyPatch, stage: int, tied: bool, expected: ModelStage
) -> None:
    monkeypatch.setattr(engine_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=stage, world_size=3))
    parallel = SimpleNamespace(data_parallel_size=1, enable_expert_parallel=False)
    model = tiny_model(num_layers=3, tied_embeddings=tied)
    assert engine_module._StageWorkers(model, parallel).stage == expected
