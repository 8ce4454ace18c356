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

from megatron_rl.generate.vllm.share import WeightShare

Init, Update = TypeVar("Init"), TypeVar("Update")


class WeightTransferEngine(Generic[Init, Update]):
    """vLLM's base class."""

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
            "get_tp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1, broadcast_object=None)
        },
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
