"""Weights arrive bit for bit in the workers of vLLM beside training ranks, for any layout of these. A death on either
side ends no other process."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bucket_helpers import HALF, device_epoch, load, worker
from checkpoint_helpers import Ranks
from composed_weights import composed_tensors
from core_helpers import VOCAB, tiny_model, tiny_run
from layout_helpers import Layout, fill, of_whole_tensor, shards_of, version_of
from torch import Tensor

from megatron_rl.generate.refit.bucket_group import BucketGroup
from megatron_rl.generate.refit.bucket_sender import BucketSender
from megatron_rl.generate.refit.epoch import Epoch, ReplicaLost, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.model_tensors import weights_by_box
from megatron_rl.generate.refit.plan import Box, ModelStage
from megatron_rl.generate.vllm.whole_weights import WholeWeights, by_name
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.recipe.model import ModelConfig

LIMIT = timedelta(seconds=60)
OF_TEST_S = 120.0
RANKS = 4
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 32}
WITH_EXPERTS = Layout(tp=2, ep=2, dp=2, sequence_parallel=True)
CASES = {
    "pp 2, tp 2, for one worker each": (Layout(tp=2, pp=2), 1, {"tied_embeddings": True}),
    "tp 2, copies, for four workers": (Layout(tp=2, dp=2), 4, {"tied_embeddings": False}),
    "experts, for two workers each": (WITH_EXPERTS, 2, EXPERTS),
    "adapters, for two workers each": (Layout(tp=4, adapters=True), 2, {"lora": {"rank": 1}, "num_query_groups": 2}),
}
"""Name -> layout of the training ranks, workers of each front, and the model."""


def model(fields: dict[str, Any]) -> ModelConfig:
    return tiny_model(**{"num_layers": 4, "vocab_size": VOCAB, **fields})


def train(
    rank: int,
    _world: int,
    layout: Layout,
    fields: dict[str, Any],
    epoch: Epoch,
    versions: int,
    dies: tuple[int, int] | None = None,
) -> tuple[dict[str, tuple[int, ...]], frozenset[ReplicaStart]]:
    """Publish versions. Returns the shapes of the whole model's tensors that this rank has parts of, and who was lost.

    dies: number of a rank, and of the round before which it is killed.
    """
    groups, config = layout.groups(), tiny_run(model=model(fields).model_dump())
    platform = select(config.job)
    policy = build_policy(config.model, VOCAB, platform, sequence_parallel=layout.sequence_parallel)
    group = BucketGroup.join(epoch, rank, LIMIT, control=groups.control)
    sender = BucketSender(weights_by_box(policy), groups.world, near=2, half=HALF)
    sender.connect(group)
    lost: frozenset[ReplicaStart] = frozenset()
    if dies is not None and rank == dies[0]:
        end_before(sender, dies[1])
    for version in range(1, versions + 1):
        fill(policy, version)
        try:
            sender.publish(version)
        except ReplicaLost as error:
            lost = error.who
            break
    group.close()
    return shapes(policy), lost


def end_before(sender: BucketSender, number: int) -> None:
    exchange = sender._exchange

    def last(own: Any, half: Tensor) -> None:
        if own.number == number:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(own, half)

    sender._exchange = last  # type: ignore[method-assign]


def shapes(policy: Policy) -> dict[str, tuple[int, ...]]:
    return {shard.key: tuple(shard.global_shape) for shard in shards_of(policy)}


class WorkersOverGloo:
    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.member, self.own_experts = self.rank, False
        self.stage: ModelStage | None = None

    def gather(self, content: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, content)
        return found

    gather_all = gather

    def broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, source)


def work(
    _rank: int,
    _world: int,
    front: int,
    fields: dict[str, Any],
    epoch: Epoch,
    versions: int,
    dies_at: int | None = None,
    asks: int = 1,
) -> tuple[list[dict[str, Tensor]], int]:
    """Load versions, as a worker of a front. Returns what was loaded, and the number of tensors that have come.

    dies_at: number of the tensor at which it is killed.
    asks: first version that it asks for.
    """
    share, seen = worker(model(fields), VOCAB, front, WorkersOverGloo(), LIMIT), 0

    def each(_name: str) -> None:
        nonlocal seen
        if (seen := seen + 1) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    found: list[dict[str, Tensor]] = []
    with suppress(TransferFailed):
        for version in range(asks, versions + 1):
            found.append(load(share, version, epoch if version == asks else None, each))
    share.close()
    return found, seen


def expected(whole_shapes: dict[str, tuple[int, ...]], fields: dict[str, Any], version: int) -> dict[str, Tensor]:
    """Hugging Face's tensors of a version of `fill`."""
    boxes: dict[Box, Tensor] = {}
    for key, shape in whole_shapes.items():
        tensor = of_whole_tensor(key, shape, version_of(key, version, adapters="lora" in fields))
        axes = 2 if ".experts.experts." in key else 1 if key.startswith("decoder.layers.") else 0
        for index in product(*map(range, shape[:axes])):
            box = Box(key, torch.float32, (*index, *[0] * (len(shape) - axes)), (*[1] * axes, *shape[axes:]))
            boxes[box] = tensor[index].reshape(box.shape)
    whole, parts = WholeWeights(model(fields), VOCAB), by_name(boxes)
    return composed_tensors(whole, parts)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case.startswith("experts") else pytest.mark.slow) for case in CASES]
)
def test_workers_get_each_version_bit_for_bit_from_any_layout(case: str, tmp_path: Path) -> None:
    layout, workers, fields = CASES[case]
    fronts = [*range(RANKS // workers)]
    epoch = device_epoch(RANKS, fronts, workers)
    training = Ranks(tmp_path / "training", RANKS, train, layout, fields, epoch, 2)
    of_fronts = [Ranks(tmp_path / f"{front}", workers, work, front, fields, epoch, 2) for front in fronts]
    trained = training.results(OF_TEST_S)
    assert not any(lost for _, lost in trained)
    whole_shapes = {key: shape for of_rank, _ in trained for key, shape in of_rank.items()}
    for front in of_fronts:
        for versions, _ in front.results(OF_TEST_S):
            assert len(versions) == 2
            for version, found in enumerate(versions, start=1):
                right = expected(whole_shapes, fields, version)
                assert found.keys() == right.keys()
                assert [name for name in right if not torch.equal(found[name], right[name])] == []


def test_the_death_of_a_worker_that_reads_leaves_the_other_fronts_the_version(tmp_path: Path) -> None:
    epoch = device_epoch(2, [0, 1], 1)
    training = Ranks(tmp_path / "training", 2, train, Layout(pp=2), {}, epoch, 2)
    whole, dying = (
        Ranks(tmp_path / f"{front}", 1, work, front, {}, epoch, 2, dies_at) for front, dies_at in enumerate([None, 9])
    )
    (first, lost), (last, also_lost) = training.results(OF_TEST_S)
    assert lost == also_lost == {(1, 0)}
    assert dying.join() == [-signal.SIGKILL]
    (((version,), _),) = whole.results()
    right = expected(first | last, {}, 1)
    assert all(torch.equal(version[name], right[name]) for name in right)


def test_the_death_of_a_rank_that_sends_ends_the_wait_of_all_workers(tmp_path: Path) -> None:
    epoch = device_epoch(2, [0, 1], 1)
    training = Ranks(tmp_path / "training", 2, train, Layout(pp=2), {}, epoch, 1, (1, 3))
    workers = [Ranks(tmp_path / f"{front}", 1, work, front, {}, epoch, 1) for front in range(2)]
    assert [versions for each in workers for versions, _ in each.results(OF_TEST_S)] == [[], []]
    assert training.join() == [1, -signal.SIGKILL]


def test_no_worker_begins_to_load_unless_all_can(tmp_path: Path) -> None:
    """An engine whose load breaks off has no weights, and starts again."""
    epoch = device_epoch(2, [0, 1], 1)
    training = Ranks(tmp_path / "training", 2, train, Layout(pp=2), {}, epoch, 1)
    willing = Ranks(tmp_path / "0", 1, work, 0, {}, epoch, 1)
    other = Ranks(tmp_path / "1", 1, work, 1, {}, epoch, 2, None, 2)  # asks for another version
    assert willing.results(OF_TEST_S) == other.results(OF_TEST_S) == [([], 0)]
    assert [lost for _, lost in training.results()] == [{(1, 0)}] * 2
