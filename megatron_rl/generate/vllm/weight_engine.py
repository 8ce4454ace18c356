"""Weight transfer engine in each of vLLM's workers: vLLM's calls become calls of a `WeightShare`.

POST /init_weight_transfer_engine  {"version": 7, "epoch": ..., "setting": ...}   begin to receive it; returns at once
POST /start_weight_update
POST /update_weights               {"version": 7, "load": false}   wait until it has arrived
POST /update_weights               {"version": 7, "load": true}    load it into the model
POST /finish_weight_update

A version of training ranks on the workers' devices comes while it is loaded, and the call before it waits until all are
ready for that. If a load breaks off, the model's weights are useless until the next version is loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_ep_group, get_pp_group, get_tp_group, get_world_group
from vllm.distributed.utils import get_pp_indices
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.plan import ModelStage
from megatron_rl.generate.vllm import cpu_drafts
from megatron_rl.generate.vllm.share import Setting, WeightShare
from megatron_rl.generate.vllm.unwatched_weights import UnwatchedWeights
from megatron_rl.model.platform.transport import beside
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.model import ModelConfig

logger = logging.getLogger(__name__)


@dataclass
class Version(WeightTransferInitInfo):
    version: int
    epoch: dict[str, Any] | None
    """Epoch whose group to join before; None: the group remains."""
    setting: dict[str, Any]


@dataclass
class UseVersion(WeightTransferUpdateInfo):
    version: int
    load: bool
    """Whether to load it, instead of waiting for it."""


class MrlWeightTransferEngine(WeightTransferEngine[Version, UseVersion]):
    """One worker's end. vLLM calls all methods in the worker's main thread, between two steps of the model."""

    init_info_cls = Version
    update_info_cls = UseVersion
    supports_draft_weight_update = False
    _share: WeightShare | None = None
    _unwatched: UnwatchedWeights
    _loads = False
    """Whether a load has begun that is not finished."""

    def init_transfer_engine(self, init_info: Version) -> None:
        if self._share is None:
            if self.device.type == "cpu":
                cpu_drafts.repair()
            memory = _pinned_memory if self.device.type == "cuda" else _memory
            setting = setting_of(init_info.setting)
            workers = _StageWorkers(setting.model, self.parallel_config)
            self._share = WeightShare(setting, workers, memory, beside(self.device), self.device)
            self._unwatched = UnwatchedWeights(stacked_experts=names_of(setting.model).stacked_experts)
        self._share.receive(init_info.version, init_info.epoch)

    def start_weight_update(self) -> None:
        """Nothing: loading begins once the weights have arrived."""

    def receive_weights(self, update_info: UseVersion) -> None:
        # vLLM reads the responses of its workers in the order of their ranks, and none after the first failure. The
        # others would then be taken for responses to its next call:
        #
        #     call 1   worker 0 fails, worker 1 fails (unread)
        #     call 2   worker 0 succeeds, worker 1: the failure of call 1
        #
        # A transfer that fails does so on all workers, so the last one speaks for all.
        try:
            self._receive(update_info)
        except TransferFailed as error:
            if self.parallel_config.rank == self.parallel_config.world_size - 1:
                raise
            logger.warning("%s", error)

    def _receive(self, update_info: UseVersion) -> None:
        share = self._share
        if share is None:
            raise RuntimeError("this worker was asked for weights before a version")
        share.wait(update_info.version)
        if not update_info.load:
            return
        self._forget_packed_experts()
        self._loads = True
        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(self._unwatched.watched(share.tensors()))
        except TransferFailed:
            self.finish_weight_update()  # vLLM would add the next version's tensors to those of layers that lack some
            raise

    def finish_weight_update(self) -> None:
        if not self._loads:
            return
        self._loads = False
        finalize_layerwise_reload(self.model, self.model_config)
        self._unwatched.put(self.model, get_tp_group().rank_in_group)
        self._renew_tied_head()

    def shutdown(self) -> None:
        if self._share is not None:
            self._share.close()

    def _forget_packed_experts(self) -> None:
        """Have the layers of experts treat the next weights like the first ones. A CPU build packs experts for its
        kernel, and vLLM does so only while a layer has no kernel, so later weights would be read in the wrong order."""
        if self.device.type == "cpu":
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if method is not None and hasattr(method, "moe_kernel"):
                    method.moe_kernel = None

    def _renew_tied_head(self) -> None:
        """Have the output layer process its weights again if it shares those of the embedding. A CPU build packs them
        for its kernel, and a reload processes a shared weight for the embedding only, so answers would come from the
        head of the first version."""
        head = getattr(self.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if self.device.type == "cpu" and method is not None and self.model_config.hf_text_config.tie_word_embeddings:
            method.process_weights_after_loading(head)


class _StageWorkers:
    """Implements `Workers` over vLLM's own group of the workers that compute the same layers."""

    def __init__(self, model: ModelConfig, parallel: Any) -> None:
        """parallel: vLLM's parallel_config."""
        # vLLM numbers its workers data-parallel replica first, then stage, then tensor-parallel rank. Its group "ep"
        # has those of one stage in all data-parallel replicas, whether or not experts are split whole.
        self._group = get_ep_group() if parallel.data_parallel_size > 1 else get_tp_group()
        self.rank, self.size = self._group.rank_in_group, self._group.world_size
        self._all = get_world_group()
        self.member = self._all.rank_in_group
        self.own_experts = bool(parallel.enable_expert_parallel) and self.size > 1
        stages, layers = get_pp_group(), model.num_layers
        self.stage = None
        if stages.world_size > 1:
            first, end = get_pp_indices(layers, stages.rank_in_group, stages.world_size)
            embedding = first == 0 or (end == layers and model.tied_embeddings)
            self.stage = ModelStage(first, end, embedding, output=end == layers)

    def gather(self, content: Any) -> list[Any]:
        return _gathered(content, self._group)

    def gather_all(self, content: Any) -> list[Any]:
        return _gathered(content, self._all)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        self._group.broadcast(tensor, src=source)


def _gathered(content: Any, group: Any) -> list[Any]:
    """Contents of all workers of one of vLLM's groups."""
    found = [content] * group.world_size
    if group.world_size > 1:  # vLLM's own broadcast of objects has the first worker as its only source
        torch.distributed.all_gather_object(found, content, group=group.cpu_group)
    return found


def setting_of(content: dict[str, Any]) -> Setting:
    return Setting(
        replica=(content["replica"], content["start"]),
        timeout=timedelta(seconds=content["timeout_s"]),
        model=ModelConfig.model_validate(content["model"]),
        vocabulary=content["vocabulary"],
    )


def _memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _pinned_memory(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
