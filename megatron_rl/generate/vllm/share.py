"""A vLLM worker's share of the weights: received from the training ranks beside the engine, then handed to the model.

Together the workers of a replica receive every weight once. Before loading they send one another the tensors, which
costs little next to the way from the training ranks, because they are on one node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rl.generate.refit.epoch import ReplicaStart, TransferFailed
from megatron_rl.generate.refit.plan import ModelShare
from megatron_rl.generate.refit.receiving import Receiving
from megatron_rl.generate.refit.transfer import Receiver
from megatron_rl.generate.vllm.whole_weights import hugging_face_tensors
from megatron_rl.model.hf_mapping import OUTPUT, sources, weights
from megatron_rl.model.sharded_names import weight_name
from megatron_rl.recipe.model import ModelConfig


class Workers(Protocol):
    rank: int
    size: int

    def gather(self, content: Any) -> list[Any]:
        """Contents of all workers. Collective."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill the tensor, on this worker's device, with that of worker `source`. Collective."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    replica: ReplicaStart
    timeout: timedelta
    """Limit of every wait for other members."""
    model: ModelConfig
    vocabulary: int
    """Tokens of the model, without the rows that pad the embedding."""


class WeightShare(Receiving):
    def __init__(
        self,
        setting: Setting,
        workers: Workers,
        host_memory: Callable[[int], Tensor],
        beside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        host_memory: see Device.host_memory. The share is staged there.
        beside: see Receiving.
        """
        receiver = Receiver(ModelShare(workers.rank, workers.size), host_memory)
        super().__init__(receiver, setting.replica, workers.rank, setting.timeout, beside)
        self._setting, self._workers = setting, workers

    def wait(self, version: int) -> None:
        """Return once the version has arrived on all workers. Collective. Raises TransferFailed."""
        failure = self.failure(version)
        if reasons := [each for each in self._workers.gather(None if failure is None else str(failure)) if each]:
            raise TransferFailed(f"version {version} has not arrived: {reasons[0]}")

    def tensors(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of the whole model under Hugging Face's names, layer after layer, on a device.

        Collective: each worker must exhaust the iterator.

        Raises ValueError if the shares of all workers together lack a tensor.
        """
        staged, setting = self.receiver.staged(), self._setting
        own = hugging_face_tensors(staged, setting.model, setting.vocabulary, device)
        owners = self._owners({box: box.dtype for box in staged})
        for name, (owner, dtype, shape) in owners.items():
            if owner == self._workers.rank:
                found, tensor = next(own)
                assert found == name, f"{found} instead of {name}"
                tensor = tensor.to(device)
            else:
                tensor = torch.empty(shape, dtype=dtype, device=device)
            if self._workers.size > 1:
                self._workers.broadcast(tensor, owner)
            yield name, tensor

    def _owners(self, dtypes: Mapping[Any, torch.dtype]) -> dict[str, tuple[int, torch.dtype, Sequence[int]]]:
        """The worker that has each tensor, with its dtype and shape, in the order of loading. Collective."""
        setting = self._setting
        mine = {weight_name(box.key, box.offset): str(dtype) for box, dtype in dtypes.items()}
        of_workers = self._workers.gather(mine)
        model = setting.model.model_copy(update={"vocab_size": setting.vocabulary})
        found: dict[str, tuple[int, torch.dtype, Sequence[int]]] = {}
        for name, weight in weights(model).items():
            if name == OUTPUT and model.tied_embeddings:
                continue
            owner = next((rank for rank, held in enumerate(of_workers) if name in held), None)
            if owner is None:
                raise ValueError(f"no training rank has sent {name}")
            dtype = getattr(torch, of_workers[owner][name].removeprefix("torch."))
            for source in weight.sources:
                found[source.name] = (owner, dtype, source.shape)
        assert found.keys() == sources(weights(model)).keys()
        return found
