"""A checkpoint loads into another layout: tensor, pipeline and data parallel sizes, distributed optimizer or not.

The loss depends on each weight separately, so training must continue with the same bits wherever a weight has moved.
Adam's moments are set to a function of their weight, so the test sees whether each moment moved with its weight.
"""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from _pytest.mark import ParameterSet
from checkpoint_helpers import checkpointer, load, run_ranks
from core_helpers import stir, tiny_model
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType

from megatron_rl.checkpoint.saving_ranks import sharded_weights
from megatron_rl.contract.paths import RunDir
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import build_policy
from megatron_rl.model.trainable import Trainable, load_part
from megatron_rl.platform.select import select
from megatron_rl.rank.config import JobConfig, TrainingLayout
from megatron_rl.rank.groups import cut
from megatron_rl.run.models import share_weights
from megatron_rl.training.adam_state import _shares
from megatron_rl.training.config import OptimizerConfig
from megatron_rl.training.optimizer import PolicyOptimizer

SAVED, LAST = 3, 6


class Layout(NamedTuple):
    ranks: int
    tp: int = 1
    pp: int = 1
    distributed: bool = True
    ep: int = 1
    cp: int = 1


ONE = Layout(1)
LAYOUTS = {
    "tp2": Layout(2, tp=2),
    "pp2": Layout(2, pp=2),
    "dp2": Layout(2),
    "dp3": Layout(3),
    "cp2": Layout(2, cp=2),
    "tp2-dp2": Layout(4, tp=2),
    "pp2-dp2": Layout(4, pp=2),
    "tp2-pp2": Layout(4, tp=2, pp=2),
    "dp2-plain": Layout(2, distributed=False),
    "dp3-plain": Layout(3, distributed=False),
    "tp2-dp2-plain": Layout(4, tp=2, distributed=False),
}

EVERY_KIND = ("cp2", "dp3", "tp2-pp2", "dp2-plain")
"""Layouts that cover each way to cut a model; the others are combinations of them."""
BACK = ("cp2", "tp2-pp2", "tp2-dp2-plain")
"""Layouts whose own checkpoints one rank loads: one for each optimizer, and one in which ranks hold copies."""


def slow_unless(quick: bool, *values: object, id: str) -> ParameterSet:
    return pytest.param(*values, id=id, marks=() if quick else pytest.mark.slow)


def a_model(dtype: str, tied: bool = False) -> ModelConfig:
    """Model whose feed-forward size makes the ranges of three ranks end within rows."""
    return tiny_model(dtype=dtype, ffn_hidden_size=44, tied_embeddings=tied, qkv_bias=True)


EXPERTS = tiny_model(dtype="bf16", tied_embeddings=False, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=20)
# Parts of this rank are multiples of any vector: Adam may round the rest of a vector in another way.
EXPERT_ADAPTERS = ModelConfig.model_validate(EXPERTS.model_dump() | {"lora": {"rank": 16}})


class Training:
    def __init__(self, layout: Layout, model: ModelConfig) -> None:
        training = TrainingLayout(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
        self.groups = cut(training, timedelta(seconds=30))
        platform = select(JobConfig(device="cpu"))
        platform.seed(1)
        self.policy = build_policy(model, 16, platform)
        # Each rank has different weights, so none can be right by chance.
        stir(self.policy, 0.3, seed=torch.distributed.get_rank())
        share_weights(self.policy, self.groups)
        self.trainable = Trainable.of(model)
        self.trainable.mark(self.policy)
        config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.01, clip_grad=0.0, distributed=layout.distributed)
        self.optimizer = PolicyOptimizer(self.policy, model, config, LAST)

    def state(self) -> dict[str, Any]:
        data, expert_data = self.groups.data_context, self.groups.expert_data
        model = sharded_weights(self.policy, data, expert_data, self.trainable.trained)
        return {"model": model, "optimizer": self.optimizer.sharded_state(model)}

    def update(self, number: int) -> None:
        self.optimizer.zero_grad()
        weights = [weight for weight in self.policy.parameters() if weight.requires_grad]
        losses = [torch.sin((number + 1.5) * weight.float()).sum() for weight in weights]
        # Only one copy of each weight counts: adding zeros is exact, adding thirds is not.
        dense = self.groups.data_context.rank() == 0
        experts = self.groups.expert_data.rank() == 0
        mine = [
            (dense if getattr(weight, "allreduce", True) else experts) and not getattr(weight, "shared", False)
            for weight in weights
        ]
        (torch.stack(losses) * torch.tensor(mine)).sum().backward()
        assert self.optimizer.update(number).applied

    def moments_match_weights(self) -> bool:
        found = [
            torch.equal(flat["exp_avg"], 2 * main) and torch.equal(flat["exp_avg_sq"], main.square())
            for flat, main in self._with_weights()
        ]
        return len(found) > 0 and all(found)

    @torch.no_grad()
    def derive_moments_from_weights(self) -> None:
        for flat, main in self._with_weights():
            flat["exp_avg"].copy_(2 * main)
            flat["exp_avg_sq"].copy_(main.square())

    def _with_weights(self) -> Any:
        parts = self.optimizer.megatron.chained_optimizers
        for share in chain.from_iterable(_shares(part, self.policy.parameters()) for part in parts):
            flat = {name: tensor.detach().view(-1) for name, tensor in share.tensors.items()}
            weight = share.parameter.detach().flatten()[share.start : share.start + len(flat["exp_avg"])]
            main = flat.get("param", weight)
            assert torch.equal(main.to(weight.dtype), weight)
            yield flat, main

    def save(self, folder: Path, step: int) -> None:
        saver = checkpointer(folder)
        saver.save(step, self.state(), {})
        saver.wait(final=True)
        (published,) = saver.poll()
        assert published.step == step, published

    def load(self, folder: Path, step: int, *, with_optimizer: bool = True) -> None:
        wanted = self.state() if with_optimizer else {"model": self.state()["model"]}
        state, _ = load(RunDir(folder).checkpoint(step), wanted, self.groups.data_context, self.groups.expert_data)
        load_part(self.policy, state["model"])
        if with_optimizer:
            self.optimizer.load_state(state["optimizer"])

    def everything(self) -> dict[str, torch.Tensor]:
        """Return weights and optimizer state of a single rank, under names that are the same in every layout."""
        state = self.state()
        of_weights = {name: weight.detach().clone() for name, weight in self.policy.named_parameters()}
        return of_weights | {
            name: item.data.clone() for name, item in state["optimizer"].items() if not isinstance(item, int)
        }


def _begin(rank: int, world_size: int, layout: Layout, model: ModelConfig, folder: Path) -> None:
    """Save a checkpoint in `folder`, and the end of the run in the same layout in folder/end."""
    training = Training(layout, model)
    for number in range(SAVED):
        training.update(number)
    training.derive_moments_from_weights()
    training.save(folder, SAVED)
    for number in range(SAVED, LAST):
        training.update(number)
    training.save(folder / "end", LAST)


def _continue(
    rank: int, world_size: int, layout: Layout, model: ModelConfig, folder: Path, end: Path, with_optimizer: bool = True
) -> bool:
    warnings.filterwarnings("error", message="c10d::broadcast_")  # autograd warns if weights are sent with gradients
    training = Training(layout, model)
    training.load(folder, SAVED, with_optimizer=with_optimizer)
    matched = training.moments_match_weights()
    for number in range(SAVED, LAST):
        training.update(number)
    training.save(end, LAST)
    return matched


def _read(rank: int, world_size: int, model: ModelConfig, *ends: Path) -> list[dict[str, torch.Tensor]]:
    training = Training(ONE, model)
    found = []
    for end in ends:
        training.load(end, LAST)
        found.append(training.everything())
    return found


def _continue_and_read(
    rank: int, world_size: int, model: ModelConfig, folder: Path
) -> tuple[bool, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Continue on one rank. Returns whether moments moved with their weights, the end here, and that in its layout."""
    training = Training(ONE, model)
    training.load(folder, SAVED)
    matched = training.moments_match_weights()
    for number in range(SAVED, LAST):
        training.update(number)
    here = training.everything()
    training.load(folder / "end", LAST)
    return matched, here, training.everything()


def ends(folder: Path, layout: Layout, model: ModelConfig, *, with_optimizer: bool = True) -> bool:
    """Whether the run in `folder` has the same end in this layout as in its own; one rank reads both."""
    end = folder / f"end-{time.monotonic_ns()}"
    matched = run_ranks(folder, layout.ranks, _continue, layout, model, folder, end, with_optimizer)
    assert all(matched) is with_optimizer
    ((ours, theirs),) = run_ranks(folder, 1, _read, model, end, folder / "end")
    return same(ours, theirs)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


MODELS = {"fp32": a_model("fp32"), "bf16": a_model("bf16")}
BF16 = MODELS["bf16"]


class OneRankRun(NamedTuple):
    """A run on one rank from start to end."""

    folder: Path
    model: ModelConfig


@pytest.fixture(scope="module")
def of_one_rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OneRankRun:
    folder, model = tmp_path_factory.mktemp("one"), MODELS[request.param]
    run_ranks(folder, 1, _begin, ONE, model, folder)
    return OneRankRun(folder, model)


@pytest.mark.parametrize(
    ("of_one_rank", "layout"),
    [slow_unless(name in EVERY_KIND, "bf16", name, id=f"bf16-{name}") for name in LAYOUTS]
    + [slow_unless(name == "tp2", "fp32", name, id=f"fp32-{name}") for name in ("tp2", "dp3", "tp2-pp2")],
    indirect=["of_one_rank"],
)
def test_run_of_one_rank_resumes_in_another_layout(of_one_rank: OneRankRun, layout: str) -> None:
    assert ends(of_one_rank.folder, LAYOUTS[layout], of_one_rank.model)


@pytest.mark.parametrize("layout", [slow_unless(name in BACK, layout, id=name) for name, layout in LAYOUTS.items()])
def test_run_of_another_layout_resumes_on_one_rank(tmp_path: Path, layout: Layout) -> None:
    check_resume_on_one_rank(tmp_path, layout, BF16)


def check_resume_on_one_rank(folder: Path, layout: Layout, model: ModelConfig) -> None:
    run_ranks(folder, layout.ranks, _begin, layout, model, folder)
    ((matched, here, there),) = run_ranks(folder, 1, _continue_and_read, model, folder)
    assert matched
    assert same(here, there)


@pytest.mark.parametrize("layout", [LAYOUTS["dp2"], LAYOUTS["dp2-plain"]], ids=["distributed", "plain"])
def test_data_parallel_ranks_write_similar_amounts(tmp_path: Path, layout: Layout) -> None:
    run_ranks(tmp_path, layout.ranks, _begin, layout, BF16, tmp_path)
    written = [path.stat().st_size for path in sorted(RunDir(tmp_path).checkpoint(SAVED).glob("*.distcp"))]
    assert len(written) == 2
    assert max(written) < 1.15 * min(written)  # the unit is a whole tensor, and these are small


def _bytes_read(rank: int, world_size: int, layout: Layout, model: ModelConfig, folder: Path) -> int:
    """Bytes of tensors read while a checkpoint is loaded."""
    training = Training(layout, model)
    found: list[int] = []
    read_data = FileSystemReader.read_data

    def counted(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        tensors = [item.storage_index for item in plan.items if item.type is LoadItemType.TENSOR]
        found.extend(self.storage_data[index].length for index in tensors)
        return read_data(self, plan, planner)

    FileSystemReader.read_data = counted  # type: ignore[method-assign]
    training.load(folder, SAVED)
    return sum(found)


@pytest.mark.parametrize(("before", "after"), [("dp2", "dp2"), ("dp2-plain", "dp2-plain"), ("dp2-plain", "dp3-plain")])
def test_data_parallel_ranks_read_a_checkpoint_once_in_similar_amounts(tmp_path: Path, before: str, after: str) -> None:
    run_ranks(tmp_path, LAYOUTS[before].ranks, _begin, LAYOUTS[before], BF16, tmp_path)
    read = run_ranks(tmp_path, LAYOUTS[after].ranks, _bytes_read, LAYOUTS[after], BF16, tmp_path)
    written = sum(path.stat().st_size for path in RunDir(tmp_path).checkpoint(SAVED).glob("*.distcp"))
    assert sum(read) <= written
    assert max(read) < 1.15 * min(read)


def test_tensor_parallel_ranks_continue_as_pipeline_stages(tmp_path: Path) -> None:
    before, after = LAYOUTS["tp2-dp2"], LAYOUTS["pp2"]
    run_ranks(tmp_path, before.ranks, _begin, before, BF16, tmp_path)
    assert ends(tmp_path, after, BF16)


@pytest.mark.parametrize("layout", [slow_unless(name == "tp2-pp2", name, id=name) for name in ("tp2-dp2", "tp2-pp2")])
def test_tied_embeddings_resume_on_one_rank(tmp_path: Path, layout: str) -> None:
    """The last stage of a pipeline has a copy of the embeddings."""
    check_resume_on_one_rank(tmp_path, LAYOUTS[layout], a_model("bf16", tied=True))


@pytest.mark.parametrize(
    "layout",
    [
        slow_unless(False, Layout(2, ep=2), id="ep2"),
        slow_unless(True, Layout(4, tp=2, ep=2), id="tp2-ep2"),
        slow_unless(False, Layout(4, ep=2, distributed=False), id="dp4-ep2-plain"),
    ],
)
def test_expert_parallel_run_resumes_on_one_rank_and_in_another_layout(tmp_path: Path, layout: Layout) -> None:
    check_resume_on_one_rank(tmp_path, layout, EXPERTS)
    assert ends(tmp_path, Layout(4, ep=2, distributed=False), EXPERTS)  # two ranks hold the same experts


@pytest.mark.slow
def test_expert_parallel_run_resumes_as_pipeline_stages(tmp_path: Path) -> None:
    before = Layout(4, tp=2, ep=2)
    run_ranks(tmp_path, before.ranks, _begin, before, EXPERTS, tmp_path)
    assert ends(tmp_path, Layout(4, tp=2, pp=2), EXPERTS)


def test_adapters_resume_on_one_rank_and_in_other_layouts(tmp_path: Path) -> None:
    check_resume_on_one_rank(tmp_path, Layout(4, tp=2, ep=2), EXPERT_ADAPTERS)
    assert ends(tmp_path, Layout(2, pp=2), EXPERT_ADAPTERS)


@pytest.mark.parametrize("of_one_rank", ["fp32"], indirect=True)
def test_comparison_detects_an_optimizer_that_was_not_loaded(of_one_rank: OneRankRun) -> None:
    assert not ends(of_one_rank.folder, LAYOUTS["tp2"], of_one_rank.model, with_optimizer=False)
