"""Workers of a vLLM over several nodes: each gets what it computes with, and nothing comes twice from training."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from composed_weights import composed_tensors
from core_helpers import VOCAB, tiny_model, tiny_policy
from torch import Tensor

from megatron_rl.generate.refit.epoch import TransferFailed
from megatron_rl.generate.refit.model_tensors import model_tensors, parts_by_box
from megatron_rl.generate.refit.plan import Box, ModelShare, ModelStage, shares_of
from megatron_rl.generate.vllm.share import Setting, WeightShare
from megatron_rl.generate.vllm.whole_weights import WholeWeights, by_name
from megatron_rl.model.sharded_names import weight_name
from megatron_rl.recipe.model import ModelConfig

LIMIT_S = 30.0
EXPERTS = {"tied_embeddings": False, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}


class Group:
    """Threads in place of workers, and what they send one another."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, content: Any) -> list[Any]:
        self._slots[rank] = content
        self._barrier.wait(LIMIT_S)
        found = [*self._slots]
        self._barrier.wait(LIMIT_S)
        return found


class Stage(Group):
    """The workers of one stage."""

    def __init__(self, size: int, stage: ModelStage | None, own_experts: bool) -> None:
        super().__init__(size)
        self.size, self.stage, self.own_experts = size, stage, own_experts
        self.sent_bytes = 0


class Worker:
    """Implements `Workers`."""

    def __init__(self, group: Stage, rank: int, everyone: Group | None = None, member: int | None = None) -> None:
        self.rank, self.member = rank, rank if member is None else member
        self._group, self._everyone = group, everyone or group
        self.size, self.stage, self.own_experts = group.size, group.stage, group.own_experts

    def gather(self, content: Any) -> list[Any]:
        return self._group.exchange(self.rank, content)

    def gather_all(self, content: Any) -> list[Any]:
        return self._everyone.exchange(self.member, content)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._group.exchange(self.rank, tensor)[source].clone())
        self._group.sent_bytes += tensor.nbytes if self.rank == source else 0


def loaded(group: Stage, shares: Sequence[Sequence[Box]], held: Mapping[Box, Tensor], model: ModelConfig) -> list[Any]:
    """Tensors that each worker loads, by name."""

    def load(rank: int) -> dict[str, Tensor]:
        setting = Setting((0, 0), timedelta(seconds=LIMIT_S), model, VOCAB)
        share = WeightShare(setting, Worker(group, rank), torch.empty, nullcontext, torch.device("cpu"))
        share.receiver.staged = lambda: {box: held[box] for box in shares[rank]}  # type: ignore[method-assign]
        return dict(share.tensors())

    with ThreadPoolExecutor(group.size) as threads:
        return [*threads.map(load, range(group.size))]


def weights_of(platform: Any, **fields: Any) -> tuple[ModelConfig, dict[Box, Tensor], dict[str, Tensor]]:
    model = tiny_model(vocab_size=VOCAB, num_layers=4, **fields)
    held = parts_by_box(model_tensors(tiny_policy(platform, model)).values())
    composed, parts = WholeWeights(model, VOCAB), by_name(held)
    return model, held, composed_tensors(composed, parts)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_stage_gets_its_layers_and_the_ends_that_it_computes(platform: Any, groups: Any, tied: bool) -> None:
    model, held, whole = weights_of(platform, tied_embeddings=tied)
    stages = [ModelStage(0, 3, embedding=True, output=False), ModelStage(3, 4, embedding=tied, output=True)]
    found = []
    for stage in stages:
        shares = shares_of([held], 2, stage)
        assert not Counter(box for share in shares for box in share) - Counter(dict.fromkeys(held, 1))
        both = loaded(Stage(2, stage, False), shares, held, model)
        assert both[0].keys() == both[1].keys()
        assert all(torch.equal(one[name], whole[name]) for one in both for name in one)
        found.append(both[0].keys())
    assert found[0] | found[1] == whole.keys()
    assert found[0] & found[1] == ({"model.embed_tokens.weight"} if tied else set())
    assert {name for name in found[1] if ".layers." in name} == {name for name in whole if ".layers.3." in name}


def test_no_stage_loads_a_version_that_another_one_lacks() -> None:
    everyone = Group(2)

    def waits(number: int) -> str:
        setting = Setting((0, 0), timedelta(seconds=LIMIT_S), tiny_model(vocab_size=VOCAB), VOCAB)
        stage = Stage(1, ModelStage(number, number + 1, embedding=number == 0, output=number == 1), False)
        worker = Worker(stage, 0, everyone, member=number)
        share = WeightShare(setting, worker, torch.empty, nullcontext, torch.device("cpu"))
        share.failure = lambda version: TransferFailed("damaged") if number == 0 else None  # type: ignore[method-assign]
        try:
            share.wait(7)
        except TransferFailed as error:
            return str(error)
        return "loads"

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(waits, range(2))] == ["version 7 has not arrived: damaged"] * 2


def test_an_expert_goes_to_the_worker_that_computes_it_alone(platform: Any, groups: Any) -> None:
    model, held, whole = weights_of(platform, **EXPERTS)
    shares, group = shares_of([held], 2, own_experts=True), Stage(2, None, True)
    assert Counter(box for share in shares for box in share) == Counter(dict.fromkeys(held, 1))
    for rank, tensors in enumerate(loaded(group, shares, held, model)):
        others = {name for name in whole if any(f".experts.{other}." in name for other in ((2, 3), (0, 1))[rank])}
        assert tensors.keys() == whole.keys() - others
        assert all(torch.equal(tensors[name], whole[name]) for name in tensors)
    assert group.sent_bytes == sum(tensor.nbytes for name, tensor in whole.items() if ".experts." not in name)


def test_a_share_of_experts_has_all_parts_of_each(platform: Any, groups: Any) -> None:
    _, held, _ = weights_of(platform, lora={"rank": 4}, **EXPERTS)
    for share in shares_of([held], 4, own_experts=True):
        experts = {weight_name(box.key, box.offset).partition("local_experts.")[2].partition(".")[0] for box in share}
        assert len(experts - {""}) == 1


@pytest.mark.parametrize("stage", [None, ModelStage(2, 5, embedding=False, output=True)])
def test_a_share_is_the_same_at_the_other_members_of_a_transfer(stage: ModelStage | None) -> None:
    share = ModelShare(1, 4, stage, own_experts=True)
    assert ModelShare.from_json(json.loads(json.dumps(share.to_json()))) == share
