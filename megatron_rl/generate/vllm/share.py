"""A vLLM worker's share of the weights: received from the training ranks, then handed to the model.

Together the workers of a pipeline stage receive every weight of its layers once. When they load, they send one another
the tensors, which costs little next to the way from the training ranks where they are on one node. Where each worker
has other experts than the rest, it receives those itself, and nobody else gets them.

From training ranks elsewhere the whole share arrives beside the engine, and is staged in host memory. From those on the
workers' devices it comes in buckets while the model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_rl.generate.refit.bucket_plan import Announced
from megatron_rl.generate.refit.bucket_receiver import BucketReceiver
from megatron_rl.generate.refit.epoch import DEVICE, Epoch, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.plan import ModelShare, ModelStage
from megatron_rl.generate.refit.receiving import Receiving
from megatron_rl.generate.refit.transfer import Receiver
from megatron_rl.generate.vllm.whole_weights import WholeWeights, by_name
from megatron_rl.model.hf_mapping import Assembly
from megatron_rl.model.sharded_names import expert_of
from megatron_rl.recipe.model import ModelConfig


class Workers(Protocol):
    """The workers of one pipeline stage of a replica."""

    rank: int
    size: int
    member: int
    """Rank of this worker among all those of the replica."""
    stage: ModelStage | None
    """None: the replica has a single stage."""
    own_experts: bool
    """Same as in ModelShare."""

    def gather(self, content: Any) -> list[Any]:
        """Contents of all workers of this stage. Collective."""
        ...

    def gather_all(self, content: Any) -> list[Any]:
        """Contents of all workers of the replica. Collective."""
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


class Load(NamedTuple):
    """A weight to load."""

    name: str
    owner: int
    """Worker that has it."""
    dtype: torch.dtype
    own: list[Tensor] | None
    """Its sources, if this worker is the owner."""


class WeightShare(Receiving):
    def __init__(
        self,
        setting: Setting,
        workers: Workers,
        host_memory: Callable[[int], Tensor],
        beside: Callable[[], AbstractContextManager[None]],
        device: torch.device,
    ) -> None:
        """
        host_memory: see Device.host_memory. The share is staged there.
        beside: see Receiving.
        device: of this worker.
        """
        share = ModelShare(workers.rank, workers.size, workers.stage, workers.own_experts)
        super().__init__(Receiver(share, host_memory), setting.replica, workers.member, setting.timeout, beside)
        self._setting, self._workers, self._device = setting, workers, device
        self._buckets: BucketReceiver | None = None  # in an epoch of the training ranks on the workers' devices
        self._begun: int | None = None  # version whose bucket is open

    def wait(self, version: int) -> None:
        """Return once the version has arrived on all workers of the replica; from training ranks on the workers'
        devices, once all workers of the epoch are ready for it. Collective over the replica. Raises TransferFailed on
        all workers, so that no stage loads a version that another one lacks."""
        failure = self.failure(version)
        if failure is None and self._buckets is not None and self._begun != version:
            try:
                self._buckets.begin(version, self._device)
                self._begun = version
            except TransferFailed as error:
                failure = error
        self._agree(version, failure)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of all that this worker computes with, under Hugging Face's names, layer after layer, on
        the device, after `wait`. A version of training ranks on the workers' devices comes meanwhile, in buckets that
        no tensor keeps.

        Collective: each worker must exhaust the iterator.

        Raises:
            ValueError: the shares of all workers together lack a tensor.
            TransferFailed: on all workers, after the last tensor, if not all of the version has come. The tensors are
                then useless.
        """
        whole = WholeWeights(self._setting.model, self._setting.vocabulary, self._device, self._workers.stage)
        assembly = Assembly(whole.expected)
        loads = self._staged(whole) if self._buckets is None else self._pulled(self._buckets, whole)
        for name, owner, dtype, own in loads:
            stacked = not whole.expected[name].sources[0].is_whole  # vLLM takes the experts of a layer at once
            shared = not self._workers.own_experts or expert_of(name) is None or stacked
            if own is None and not shared:
                continue
            for number, source in enumerate(whole.expected[name].sources):
                matrix = self._empty(source.shape, dtype) if own is None else own[number]
                if shared and self._workers.size > 1:
                    self._workers.broadcast(matrix, owner)
                yield from assembly.add(source, matrix)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _staged(self, whole: WholeWeights) -> Iterator[Load]:
        parts = by_name(self.receiver.staged())
        dtypes = {name: str(next(iter(of)).dtype).removeprefix("torch.") for name, of in parts.items()}
        of_workers = self._workers.gather(dtypes)
        whole.check({name for held in of_workers for name in held})
        for name in whole.expected:
            owner = next(rank for rank, held in enumerate(of_workers) if name in held)
            own = whole.compose(name, parts) if owner == self._workers.rank else None
            yield Load(name, owner, getattr(torch, of_workers[owner][name]), own)

    def _pulled(self, buckets: BucketReceiver, whole: WholeWeights) -> Iterator[Load]:
        version, self._begun = self._begun, None
        assert version is not None, "`wait` was not called"
        failure = None
        whole.check({each.name for each in buckets.announced})
        for each in buckets.announced:
            own = None
            try:
                # A worker that has failed still takes part in the broadcasts, since the others wait for it there.
                if failure is None:
                    buckets.reach(each.last_round)
                    own = self._own(buckets, whole, each)
            except TransferFailed as error:
                failure = error
            if each.name in whole.expected:
                yield Load(each.name, each.worker, getattr(torch, each.dtype), own)
        try:
            if failure is None:
                buckets.end()
        except TransferFailed as error:
            failure = error
        self._agree(version, failure)

    def _own(self, buckets: BucketReceiver, whole: WholeWeights, each: Announced) -> list[Tensor] | None:
        if each.worker != self._workers.rank:
            return None
        parts = {name: buckets.parts_of(name) for name in (each.name, *whole.adapter_of(each.name))}
        return whole.compose(each.name, parts) if each.name in whole.expected else None

    def _agree(self, version: int, failure: BaseException | None) -> None:
        reasons = self._workers.gather_all(None if failure is None else str(failure))
        if found := [each for each in reasons if each is not None]:
            raise TransferFailed(f"version {version} has not arrived: {found[0]}")

    def _receive(self, version: int, epoch: Epoch | None) -> None:
        self._begun = None
        if epoch is not None:
            self._leave()
            if epoch.backend == DEVICE:
                rank = self._setting.replica[0] * self._workers.size + self._workers.rank
                self._buckets = BucketReceiver.join(epoch, rank, self._setting.timeout.total_seconds())
        if self._buckets is None:
            super()._receive(version, epoch)
        else:
            self._received = version

    def _leave(self) -> None:
        super()._leave()
        buckets, self._buckets = self._buckets, None
        if buckets is not None:
            buckets.close()
