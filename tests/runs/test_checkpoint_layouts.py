"""A checkpoint loads into another layout: tensor, pipeline and data parallel sizes, distributed optimizer or not.

The loss depends on each weight separately, so training must continue with the same bits wherever a weight has moved.
Adam's moments are set to a function of their weight, so the test sees whether each moment moved with its weight.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from checkpoint_helpers import Ranks, checkpointer, load
from core_helpers import stir, tiny_model
from megatron.core import parallel_state
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType

from megatron_rl.checkpoint.saving_ranks import sharded_weights
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.training.adam_state import _shares
from megatron_rl.learn.training.optimizer import PolicyOptimizer
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import build_policy
from megatron_rl.model.trainable import Trainable, load_part
from megatron_rl.rank.groups import cut
from megatron_rl.recipe.job import JobConfig, TrainingLayout
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.training import OptimizerConfig
from megatron_rl.run.models import share_weights

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
    "ep2": Layout(2, ep=2),
    "tp2-ep2": Layout(4, tp=2, ep=2),
    "dp4-ep2-plain": Layout(4, ep=2, distributed=False),  # two ranks hold the same experts
    "one": ONE,
}


def a_model(dtype: str, tied: bool = False) -> ModelConfig:
    """Model whose feed-forward size makes the ranges of three ranks end within rows."""
    return tiny_model(dtype=dtype, ffn_hidden_size=44, tied_embeddings=tied, qkv_bias=True)


EXPERTS = tiny_model(dtype="bf16", tied_embeddings=False, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=20)
SHARING = EXPERTS.model_dump() | {
    "dense_layers": 1,
    "expert_ffn_hidden_size": 32,
    "shared_expert_ffn_hidden_size": 32,
    "router": {"score": "sigmoid", "correction_bias": True},
}
LATENT = SHARING | {
    "num_query_groups": 4,
    "qkv_bias": False,
    "latent_attention": {
        "q_lora_rank": 16,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 16,
        "v_head_dim": 8,
    },
}
UNLIKE = SHARING | {
    "shared_expert_gate": True,
    "expert_bias": True,
    "num_attention_heads": 32,
    "head_dim": 4,
    "attention_sinks": True,
    "output_bias": True,
}
MODELS = {
    "fp32": a_model("fp32"),
    "bf16": a_model("bf16"),
    "tied": a_model("bf16", tied=True),
    "experts": EXPERTS,
    "unlike layers": ModelConfig.model_validate(UNLIKE),
    "delta nets": tiny_model(
        dtype="bf16",
        layer_types=["linear_attention", "full_attention"],
        delta_net={"key_heads": 8, "value_heads": 32, "key_head_dim": 4, "value_head_dim": 4},
        attention_gate=True,
        qk_norm=True,
        qk_norm_of="layer",
        zero_centered_norms=True,
        norms="around",
    ),
    "predicting": ModelConfig.model_validate(SHARING | {"prediction_layers": 1, "prediction_loss_coefficient": 0.1}),
    "adapters": ModelConfig.model_validate(EXPERTS.model_dump() | {"lora": {"rank": 16}}),
    "latent": ModelConfig.model_validate(LATENT),
    "latent adapters": ModelConfig.model_validate(LATENT | {"lora": {"rank": 16}}),
}
"""The parts of adapters, biases and sinks are multiples of any vector: Adam may round the rest of a vector in another
way."""


class Begun(NamedTuple):
    """A run that saves a checkpoint and continues to its end, both in the same layout."""

    model: str
    layout: str

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].ranks

    def folder(self, root: Path) -> Path:
        return root / f"{self.model} {self.layout}"


class Continued(NamedTuple):
    """The same run, continued from its checkpoint in another layout."""

    model: str
    before: str
    layout: str
    with_optimizer: bool = True

    @property
    def begun(self) -> Begun:
        return Begun(self.model, self.before)

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].ranks

    def folder(self, root: Path) -> Path:
        return root / f"{self.model} {self.before} then {self.layout}, {self.with_optimizer}"


class Outcome(NamedTuple):
    matched: bool
    """Whether each of Adam's moments moved with its weight."""
    same_end: bool
    """Whether the run ended with the bits of the run that stayed in its layout."""
    read: list[int]
    """Bytes of tensors that each rank read."""


QUICK = (
    *(Continued("bf16", "one", layout) for layout in ("cp2", "dp3", "tp2-pp2")),  # each way to cut a model
    Continued("bf16", "tp2-dp2-plain", "one"),  # copies, each optimizer
    *(Continued("bf16", *pair) for pair in (("dp2", "dp2"), ("dp2-plain", "dp2-plain"), ("dp2-plain", "dp3-plain"))),
    Continued("tied", "tp2-pp2", "one"),  # the last stage of a pipeline has a copy of the embeddings
    Continued("experts", "tp2-ep2", "dp4-ep2-plain"),
    *(Continued(name, "tp2-ep2", "pp2") for name in ("adapters", "unlike layers", "latent adapters")),
    Continued("predicting", "pp2", "tp2-ep2"),
    Continued("delta nets", "tp2-pp2", "one"),
)
"""Each way to cut a model. Other pairs combine these."""
OTHERS = (
    Continued("bf16", "one", "dp2-plain"),
    *(Continued("bf16", layout, "one") for layout in ("cp2", "tp2-pp2")),
    Continued("bf16", "tp2-dp2", "pp2"),
    Continued("fp32", "dp2", "dp2"),
    Continued("experts", "tp2-ep2", "one"),
    Continued("adapters", "tp2-ep2", "one"),
    Continued("latent", "tp2-ep2", "pp2"),
    Continued("delta nets", "dp2", "tp2"),
)
DENSE = [name for name, layout in LAYOUTS.items() if layout.ep == 1 and layout != ONE]
ALL = dict.fromkeys(
    (
        *QUICK,
        *OTHERS,
        *(Continued("bf16", "one", layout) for layout in DENSE),
        *(Continued("bf16", layout, "one") for layout in DENSE),
        *(Continued("fp32", "one", layout) for layout in ("dp3", "tp2", "tp2-pp2")),
        Continued("tied", "tp2-dp2", "one"),
        *(Continued("experts", "ep2", layout) for layout in ("one", "dp4-ep2-plain")),
        *(Continued("experts", "dp4-ep2-plain", layout) for layout in ("one", "dp4-ep2-plain")),
        Continued("experts", "tp2-ep2", "tp2-pp2"),
    )
)
NOT_LOADED = Continued("fp32", "one", "tp2", with_optimizer=False)


class Training:
    def __init__(self, layout: Layout, model: ModelConfig) -> None:
        training = TrainingLayout(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
        parallel_state.destroy_model_parallel()
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


def begin(rank: int, world_size: int, runs: Sequence[Begun], root: Path) -> list[bool]:
    """Save a checkpoint of each run in its folder, and its end in folder/end."""
    for run in runs:
        training, folder = Training(LAYOUTS[run.layout], MODELS[run.model]), run.folder(root)
        for number in range(SAVED):
            training.update(number)
        training.derive_moments_from_weights()
        training.save(folder, SAVED)
        for number in range(SAVED, LAST):
            training.update(number)
        training.save(folder / "end", LAST)
    return [True] * len(runs)


def go_on(rank: int, world_size: int, runs: Sequence[Continued], root: Path) -> list[tuple[bool, int]]:
    """Continue each run and save its end. Returns whether moments moved with their weights, and the bytes read."""
    warnings.filterwarnings("error", message="c10d::broadcast_")  # autograd warns if weights are sent with gradients
    found = []
    for run in runs:
        training = Training(LAYOUTS[run.layout], MODELS[run.model])
        with bytes_read() as sizes:
            training.load(run.begun.folder(root), SAVED, with_optimizer=run.with_optimizer)
        found.append((training.moments_match_weights(), sum(sizes)))
        for number in range(SAVED, LAST):
            training.update(number)
        training.save(run.folder(root), LAST)
    return found


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """Sizes of the tensors read while a checkpoint is loaded."""
    found: list[int] = []
    read_data = FileSystemReader.read_data

    def counted(self: FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Any:
        tensors = [item.storage_index for item in plan.items if item.type is LoadItemType.TENSOR]
        found.extend(self.storage_data[index].length for index in tensors)
        return read_data(self, plan, planner)

    with mock.patch.object(FileSystemReader, "read_data", counted):
        yield found


def compare(rank: int, world_size: int, runs: Sequence[Continued], root: Path) -> list[bool]:
    """Load both ends of each run on one rank, and return whether they have the same bits."""
    found = []
    for run in runs:
        training = Training(ONE, MODELS[run.model])
        training.load(run.folder(root), LAST)
        ours = training.everything()
        training.load(run.begun.folder(root) / "end", LAST)
        theirs = training.everything()
        assert ours.keys() == theirs.keys()
        found.append(all(torch.equal(ours[name], theirs[name]) for name in ours))
    return found


def outcomes(root: Path, runs: Sequence[Continued]) -> dict[Continued, Outcome]:
    """Begin and continue all runs, in one world for each number of ranks."""

    def by_ranks(function: Callable[..., Any], all_runs: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
        for ranks, some in groupby(sorted(all_runs, key=attrgetter("ranks")), key=attrgetter("ranks")):
            of_world = [*some]
            results = Ranks(root, ranks, function, of_world, root).results(timeout_s=240)
            for number, run in enumerate(of_world):
                yield run, [each[number] for each in results]

    dict(by_ranks(begin, dict.fromkeys(run.begun for run in runs)))
    continued = dict(by_ranks(go_on, runs))
    (same_ends,) = Ranks(root, 1, compare, runs, root).results(timeout_s=240)
    return {
        run: Outcome(all(matched for matched, _ in continued[run]), same, [read for _, read in continued[run]])
        for run, same in zip(runs, same_ends, strict=True)
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs of `make test`."""
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def quick(root: Path) -> dict[Continued, Outcome]:
    return outcomes(root, [*QUICK, NOT_LOADED])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> dict[Continued, Outcome]:
    return outcomes(tmp_path_factory.mktemp("slow"), [run for run in ALL if run not in QUICK])


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            run, id=f"{run.model}, {run.before} then {run.layout}", marks=() if run in QUICK else pytest.mark.slow
        )
        for run in ALL
    ],
)
def test_run_resumes_in_another_layout_with_the_same_bits(run: Continued, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("quick" if run in QUICK else "slow")[run]
    assert found.matched and found.same_end


def test_comparison_detects_an_optimizer_that_was_not_loaded(quick: dict[Continued, Outcome]) -> None:
    found = quick[NOT_LOADED]
    assert not found.matched and not found.same_end


@pytest.mark.parametrize("layout", ["dp2", "dp2-plain"])
def test_data_parallel_ranks_write_similar_amounts(layout: str, quick: dict[Continued, Outcome], root: Path) -> None:
    written = sizes_written(Begun("bf16", layout), root)
    assert len(written) == 2
    assert max(written) < 1.15 * min(written)  # the unit is a whole tensor, and these are small


@pytest.mark.parametrize(("before", "after"), [("dp2", "dp2"), ("dp2-plain", "dp2-plain"), ("dp2-plain", "dp3-plain")])
def test_data_parallel_ranks_read_a_checkpoint_once_in_similar_amounts(
    before: str, after: str, quick: dict[Continued, Outcome], root: Path
) -> None:
    run = Continued("bf16", before, after)
    read = quick[run].read
    assert sum(read) <= sum(sizes_written(run.begun, root))
    assert max(read) < 1.15 * min(read)


def sizes_written(run: Begun, root: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(RunDir(run.folder(root)).checkpoint(SAVED).glob("*.distcp"))]
