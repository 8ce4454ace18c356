"""A model split over ranks in any layout trains as on one rank: log-probs, losses, gradients and updates."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_helpers import Ranks
from core_helpers import batch_of, grouped_products, here_of, random_groups, tiny_model, tiny_run, with_choices
from family_shapes import DEEPSEEK, GEMMA, GPT_OSS, LATENT, OLMO
from layout_helpers import Layout, boxes, of_whole_model, shards_of, sharpen, whole
from torch import Tensor

from megatron_rl.agent.api import build_environment
from megatron_rl.algorithms.credit import Credit
from megatron_rl.contract.codes import CACHE_VARIABLE
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.stream import shares
from megatron_rl.learn.training import optimizer as optimizer_module
from megatron_rl.learn.training import overlap
from megatron_rl.learn.training.objective import Scores, objective_of
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.learn.training.training_batch import agree, training_batch, update_batch, update_part
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.lora_mapping import is_adapter
from megatron_rl.model.platform.select import select
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.metrics.stats import Tally
from megatron_rl.rank.safe_points import LeaveAgreed
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.run.models import build_models

STEPS = 2
CLOSE = 1e-5
EVERYTHING = {
    "prompts_per_step": 4,
    "group_size": 4,
    "kl_beta": 0.1,
    "importance": {"upper": 2.0},
    "entropy_coefficient": 0.01,
    "iterations": 2,
}
DENSE = tiny_model(qk_norm=True)
# One of two parts of its vocabulary is all padding.
UNTIED = tiny_model(num_layers=4, tied_embeddings=False, vocab_multiple=32)
EXPERTS = tiny_model(tied_embeddings=False, num_experts=4, experts_per_token=2, expert_ffn_hidden_size=24)
UNLIKE = ModelConfig.model_validate(
    EXPERTS.model_dump()
    | {
        "qk_norm": True,  # otherwise biases of dimensions without rotation have no gradient but rounding
        "partial_rotary_factor": 0.5,
        "dense_layers": 1,
        "shared_expert_ffn_hidden_size": 40,
        "shared_expert_gate": True,
        "expert_bias": True,
        "swiglu_limit": 2.0,
        "router": {"score": "sigmoid", "groups": 2, "correction_bias": True, "linear_bias": True, "scale": 1.5},
        "router_bias_update_rate": 0.05,
    }
)
"""Layers that differ, with all parts of experts."""
DELTA = tiny_model(
    num_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    delta_net={"key_heads": 4, "value_heads": 8, "key_head_dim": 8, "value_head_dim": 6},
    qkv_bias=False,
    qk_norm=True,
    attention_gate=True,
    zero_centered_norms=True,
    partial_rotary_factor=0.5,
    tied_embeddings=False,
    layernorm_epsilon=1e-3,  # the norm in a delta net would enlarge the rounding of results near 0
)
"""Qwen3.5."""
SHARING = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 24,
    "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
}
LORA = {"rank": 4, "targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]}
MODELS = {
    "dense": DENSE,
    "untied": UNTIED,
    "experts": EXPERTS,
    "unlike layers": UNLIKE,
    "gpt-oss": tiny_model(**GPT_OSS),
    "gemma": tiny_model(**GEMMA),
    "olmo": tiny_model(**OLMO),
    "delta nets": DELTA,
    "delta experts": ModelConfig.model_validate(DELTA.model_dump() | SHARING),
    "delta adapters": ModelConfig.model_validate(
        DELTA.model_dump() | {"lora": {"rank": 4, "alpha": 4.0, "dropout": 0.3}}
    ),
    "delta experts with adapters": ModelConfig.model_validate(
        DELTA.model_dump() | SHARING | {"lora": {"rank": 4, "alpha": 4.0}}
    ),
    "bf16": DENSE.model_copy(update={"dtype": "bf16"}),
    "adapters": tiny_model(qk_norm=True, lora=LORA),
    "adapters that drop": tiny_model(qk_norm=True, lora=LORA | {"dropout": 0.3}),
    "replayed": ModelConfig.model_validate(UNLIKE.model_dump() | {"router_replay": "rollout"}),
    "first choices": ModelConfig.model_validate(EXPERTS.model_dump() | {"router_replay": "old"}),
    "expert adapters": ModelConfig.model_validate(EXPERTS.model_dump() | {"lora": LORA}),
    "latent": tiny_model(**LATENT),
    "latent, plain queries": tiny_model(
        **LATENT | {"latent_attention": LATENT["latent_attention"] | {"q_lora_rank": None}}
    ),
    "latent adapters": tiny_model(**LATENT, lora={"rank": 4, "alpha": 4.0, "dropout": 0.3}),
    "deepseek": tiny_model(**DEEPSEEK),
    "predicting": tiny_model(**DEEPSEEK, prediction_layers=1, prediction_loss_coefficient=0.3),
    "predicting, tied": tiny_model(num_layers=3, prediction_layers=1, prediction_loss_coefficient=0.3),
    "unlike adapters": ModelConfig.model_validate(UNLIKE.model_dump() | {"lora": LORA, "router_bias_update_rate": 0}),
}
GROUPED = {
    "grouped experts": "experts",
    "grouped adapters": "expert adapters",
    "grouped unlike layers": "unlike layers",
    "grouped unlike adapters": "unlike adapters",
}
"""Models whose experts a layout multiplies all at once; one rank multiplies them one by one. By the names of those."""
OVERLAPPED = {"overlapped": "dense", "overlapped experts": "experts", "overlapped untied": "untied"}
"""Models whose data-parallel ranks reduce gradients during backward passes, and gather weights during forward ones. One
rank does neither."""
PLAIN = GROUPED | OVERLAPPED

LAYOUTS = {
    "DP2": ("dense", Layout(dp=2)),
    "TP2": ("dense", Layout(tp=2)),
    "TP2 bf16": ("bf16", Layout(tp=2)),
    "TP2 SP": ("dense", Layout(tp=2, sequence_parallel=True)),
    "PP2": ("dense", Layout(pp=2)),
    "EP2": ("experts", Layout(ep=2, dp=2)),
    "CP2": ("dense", Layout(cp=2)),
    "EP2 CP2": ("experts", Layout(ep=2, cp=2)),
    "PP4 untied": ("untied", Layout(pp=4)),
    "PP2 uneven": ("untied", Layout(pp=2, first_stage_layers=3)),
    "TP2 PP2 untied": ("untied", Layout(tp=2, pp=2)),
    "TP2 DP2": ("dense", Layout(tp=2, dp=2)),
    "CP2 TP2 SP": ("dense", Layout(cp=2, tp=2, sequence_parallel=True)),
    "CP2 PP2 untied": ("untied", Layout(cp=2, pp=2)),
    "EP2 TP2": ("experts", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "CP2 PP2 replayed": ("replayed", Layout(cp=2, pp=2)),
    "EP2 TP2 replayed": ("replayed", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "PP2 first choices": ("first choices", Layout(pp=2)),
    "TP2 adapters": ("adapters", Layout(tp=2)),
    "TP2 SP adapters": ("adapters that drop", Layout(tp=2, sequence_parallel=True)),
    "TP4 adapters": ("adapters that drop", Layout(tp=4)),  # more ranks than key/value heads
    "PP2 DP2 adapters": ("adapters", Layout(pp=2, dp=2)),
    "CP2 adapters": ("adapters", Layout(cp=2)),
    "EP2 adapters": ("expert adapters", Layout(ep=2, dp=2)),
    "EP2 TP2 adapters": ("expert adapters", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "DP2 overlapped": ("overlapped", Layout(dp=2)),
    "TP2 DP2 overlapped": ("overlapped", Layout(tp=2, dp=2, sequence_parallel=True)),
    "PP2 DP2 overlapped": ("overlapped untied", Layout(pp=2, dp=2)),
    "EP2 TP2 overlapped": ("overlapped experts", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "grouped": ("grouped experts", Layout()),
    "EP2 grouped": ("grouped experts", Layout(ep=2, dp=2)),
    "EP2 TP2 grouped": ("grouped experts", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "PP2 DP2 grouped adapters": ("grouped adapters", Layout(pp=2, dp=2)),
    "PP2 unlike layers": ("unlike layers", Layout(pp=2)),
    "CP2 unlike layers": ("unlike layers", Layout(cp=2, ep=2)),
    "TP2 PP2 unlike layers": ("unlike layers", Layout(tp=2, pp=2, sequence_parallel=True)),
    "EP2 PP2 unlike layers": ("unlike layers", Layout(ep=2, pp=2, dp=2)),
    "CP2 TP2 unlike layers": ("unlike layers", Layout(cp=2, tp=2, sequence_parallel=True)),
    "EP2 TP2 unlike layers": ("unlike layers", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "EP2 TP2 grouped unlike layers": ("grouped unlike layers", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "CP2 EP2 gpt-oss": ("gpt-oss", Layout(cp=2, ep=2)),
    "TP2 PP2 gpt-oss": ("gpt-oss", Layout(tp=2, pp=2, sequence_parallel=True)),
    "TP2 SP Gemma": ("gemma", Layout(tp=2, sequence_parallel=True)),
    "CP2 Gemma": ("gemma", Layout(cp=2)),
    "PP2 Gemma": ("gemma", Layout(pp=2)),
    "TP2 SP OLMo": ("olmo", Layout(tp=2, sequence_parallel=True)),
    "CP2 OLMo": ("olmo", Layout(cp=2)),
    "PP2 OLMo": ("olmo", Layout(pp=2)),
    "TP4 gpt-oss": ("gpt-oss", Layout(tp=4, sequence_parallel=True)),
    "TP2 grouped unlike adapters": ("grouped unlike adapters", Layout(tp=2, sequence_parallel=True)),
    "TP2 delta nets": ("delta nets", Layout(tp=2)),
    "CP2 EP2 delta nets": ("delta experts", Layout(cp=2, ep=2)),
    "CP2 TP2 SP delta nets": ("delta nets", Layout(cp=2, tp=2, sequence_parallel=True)),
    "TP2 PP2 delta nets": ("delta nets", Layout(tp=2, pp=2)),
    "TP4 delta nets": ("delta nets", Layout(tp=4)),  # ranks share key/value heads and their gated queries
    "EP2 TP2 delta nets": ("delta experts", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "TP2 SP delta adapters": ("delta adapters", Layout(tp=2, sequence_parallel=True)),
    "EP2 TP2 delta adapters": ("delta experts with adapters", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "EP2 TP2 grouped adapters": ("grouped adapters", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "TP2 latent": ("latent", Layout(tp=2)),
    "TP2 SP latent": ("latent", Layout(tp=2, sequence_parallel=True)),
    "TP2 SP latent, plain queries": ("latent, plain queries", Layout(tp=2, sequence_parallel=True)),
    "TP2 latent adapters": ("latent adapters", Layout(tp=2)),
    "TP2 SP latent adapters": ("latent adapters", Layout(tp=2, sequence_parallel=True)),
    "PP2 DeepSeek": ("deepseek", Layout(pp=2)),
    "CP2 DeepSeek": ("deepseek", Layout(cp=2)),
    "EP2 DeepSeek": ("deepseek", Layout(ep=2, dp=2)),
    "EP2 CP2 DeepSeek": ("deepseek", Layout(ep=2, cp=2)),
    "CP2 PP2 DeepSeek": ("deepseek", Layout(cp=2, pp=2)),
    "TP2 PP2 DeepSeek": ("deepseek", Layout(tp=2, pp=2, sequence_parallel=True)),
    "EP2 PP2 DeepSeek": ("deepseek", Layout(ep=2, dp=2, pp=2)),
    "CP2 TP2 DeepSeek": ("deepseek", Layout(cp=2, tp=2, sequence_parallel=True)),
    "EP2 TP2 DeepSeek": ("deepseek", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
    "TP2 predicting": ("predicting, tied", Layout(tp=2)),
    "PP2 predicting": ("predicting, tied", Layout(pp=2, first_stage_layers=2)),
    "PP3 predicting": ("predicting, tied", Layout(pp=3)),
    "CP2 predicting": ("predicting", Layout(cp=2)),
    "EP2 predicting": ("predicting", Layout(ep=2, dp=2)),
    "CP2 PP2 predicting": ("predicting", Layout(cp=2, pp=2)),
    "TP2 PP2 predicting": ("predicting", Layout(tp=2, pp=2, sequence_parallel=True)),
    "CP2 TP2 predicting": ("predicting", Layout(cp=2, tp=2, sequence_parallel=True)),
    "EP2 TP2 predicting": ("predicting", Layout(tp=2, ep=2, dp=2, sequence_parallel=True)),
}
QUICK = {
    *("TP2 bf16", "PP2 uneven", "EP2 CP2", "EP2 TP2 replayed", "EP2 TP2 grouped adapters"),
    *("TP2 PP2 gpt-oss", "CP2 EP2 delta nets", "TP2 SP latent adapters", "CP2 PP2 predicting"),
}
"""Each way to split a model; `make test-slow` runs all pairs of ways and kinds of models. DP alone is in
test_trainer_ranks.py."""


class Seen(NamedTuple):
    """Observations of one rank."""

    logprobs: Tensor | None
    """[trained tokens] of the replica's share of the batch, where the rank reports."""
    initial: Any
    gradients: Any
    after_sgd: Any
    losses: list[dict[str, float]]
    """Losses of Adam's steps, reduced over all ranks."""
    after_adam: Any


def recipe(layout: Layout, model: str, *, distributed: bool = True) -> RunConfig:
    recompute = "selective" if layout.sequence_parallel else "none"
    if layout.pp > 1 and model in ("replayed", "first choices"):
        recompute = "full"
    return tiny_run(
        model=MODELS[PLAIN.get(model, model)].model_dump(),
        placement={"training": layout.config.model_dump()},
        job={"gpus_per_node": layout.ranks},
        grpo=EVERYTHING,
        sampling={"max_new_tokens": 7, "temperature": 0.8},
        optimizer={
            "learning_rate": 1e-3,
            "distributed": distributed,
            "overlap_grad_reduce": model in OVERLAPPED,
            "overlap_param_gather": distributed and model in OVERLAPPED and PLAIN[model] != "experts",
        },
        training={"tokens_per_microbatch": 60, "recompute": recompute},
    )


def seen(layout: Layout, model: str, groups: Groups) -> Seen:
    config = recipe(layout, model)
    plain = recipe(layout, model, distributed=False)  # has whole gradients on every rank
    trainer, initial = build(plain, groups)
    policy = trainer.policy
    rollouts = share_of(config, groups, seed=0)
    logprobs = scored(trainer, rollouts)
    gradient(trainer, rollouts)
    gradients = boxes(policy, gradient_of)
    with torch.no_grad():
        for weight in policy.parameters():
            weight -= (0.1 * gradient_of(weight)).to(weight.dtype)
    after_sgd = boxes(policy, lambda weight: weight)

    trainer, _ = build(config, groups)
    losses, recorded, expected = [], KeptLogprobs(), None
    for step in range(1, STEPS + 1):
        tally, share = Tally(), share_of(config, groups, seed=step)
        if step == STEPS:
            expected = scored(trainer, share)
        trainer.train(share, step, record=recorded).put(tally)
        if expected is not None and groups.reports:
            trained = recorded.logprobs != 0  # the rest has no advantage
            assert trained.any()
            assert torch.allclose(recorded.logprobs[trained], expected[trained], atol=1e-4)
        total = dict(tally.reduce(groups.control).total)
        del total["batch.packed_tokens"]  # depends on how the layout packs prompts
        if replayed := total.pop("router.replayed", 0):
            # Ranks that share tokens count the same choices, and so does a pass that recomputes layers.
            assert 0 < total.pop("router.differing") / replayed < 1
        losses.append(total)
    return Seen(
        logprobs if groups.reports else None,
        initial,
        gradients,
        after_sgd,
        losses,
        boxes(trainer.policy, lambda weight: weight),
    )


class KeptLogprobs:
    """Stands in for a `RolloutRecord` of which every step is sampled."""

    logprobs: Tensor

    def is_sampled(self, step: int) -> bool:
        return True

    def add(self, step: int, batch: RolloutBatch, credit: Credit | None, logprobs: Tensor) -> None:
        self.logprobs = logprobs.clone()


def gradient_of(weight: Tensor) -> Tensor:
    """Gradient of a weight; zeros if it is not trained."""
    return weight.main_grad if weight.requires_grad else torch.zeros_like(weight)


def build(config: RunConfig, groups: Groups) -> tuple[Trainer, Any]:
    """Build a trainer of the recipe's model. Returns it with the initial weights of a run."""
    here = here_of(select(config.job), groups)
    tokenizer = build_tokenizer(config.tokenizer)
    environment = build_environment(config.task, tokenizer)
    models, _ = build_models(config, here, tokenizer, environment, resumes=False)
    initial = boxes(models.policy, lambda weight: weight)
    sharpen(models.policy)
    for shard in shards_of(models.policy):
        if is_adapter(shard.key):
            shard.data.detach().copy_(of_whole_model(shard, version=1))
    models.optimizer.megatron.reload_model_params()
    objective = objective_of(config, models.policy, models.reference)
    return Trainer(models.policy, models.optimizer, objective, config, here), initial


def share_of(config: RunConfig, groups: Groups, seed: int) -> RolloutBatch:
    """This replica's share of recorded rollouts."""
    recorded = random_groups(config.grpo.prompts_per_step, config.grpo.group_size, seed=seed)
    if config.model.router_replay == "rollout":
        recorded = with_choices(recorded, ChoiceForm.of(config.model), seed)
    share = shares(0, len(recorded), groups.data.size())[groups.data.rank()]
    return batch_of(recorded, share.start, share.stop)


def scored(trainer: Trainer, rollouts: RolloutBatch) -> Tensor:
    batch, update = one_update(trainer, rollouts)
    return trainer.score(trainer.policy, batch, update.inputs)


def gradient(trainer: Trainer, rollouts: RolloutBatch) -> None:
    """Compute the gradient of the first update, summed over all ranks and not applied."""
    trainer.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite, so that it is not applied
    batch, update = one_update(trainer, rollouts)
    reference = trainer.score(trainer.objective.reference, batch, update.inputs)
    trainer._update(batch, update, Scores(reference=reference), [], None, lambda: None)


def one_update(trainer: Trainer, rollouts: RolloutBatch) -> Any:
    config = trainer.config
    groups = rollouts.groups
    batch = training_batch(groups, trainer.objective.credit(groups), config, 0, trainer.platform.device)
    part = update_part(batch, range(len(batch.sequences)), config, trainer.platform.kernels)
    (agreed,) = agree([part], trainer.groups)
    return batch, trainer._input(batch, update_batch(part, agreed), trainer.replays())


def layouts_of(rank: int, ranks: int, quick: bool) -> dict[str, Any]:
    """Observations of this rank in the layouts of this number of ranks, quick or slow ones."""
    found = {}
    for name, (model, layout) in LAYOUTS.items():
        if layout.ranks == ranks and (name in QUICK) == quick:
            small = mock.patch.object(overlap, "BUCKET_WEIGHTS", 2000)  # otherwise one bucket holds all weights
            with grouped_products() if model in GROUPED else nullcontext(), small:
                found[name] = seen(layout, model, layout.groups())
    return found


def more_of(rank: int, ranks: int, cache: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if ranks == 4:
        found["taught"] = taught(Layout(tp=2, pp=2), cache)
        found["asked"] = asked_to_leave(Layout(tp=2, pp=2))
    if ranks == 2:
        found["control"] = [without_sums_of_copies(layout) for layout in (Layout(tp=2), Layout(pp=2))]
    return found


def taught(layout: Layout, cache: Path) -> Any:
    os.environ[CACHE_VARIABLE] = str(cache / "cache")
    groups = layout.groups()
    config = tiny_run(
        model=tiny_model(init="supervised", supervised={"steps": 6, "batch_size": 8}).model_dump(),
        placement={"training": layout.config.model_dump()},
        job={"gpus_per_node": layout.ranks},
    )
    return build(config, groups)[1]


def asked_to_leave(layout: Layout) -> tuple[bool, bool]:
    """Whether a step ended on this rank because one rank was asked to leave, and left the weights unchanged."""
    config = recipe(layout, "dense")
    groups = layout.groups()
    trainer, _ = build(config, groups)
    trainer.safe_points.connect(groups)
    trainer.safe_points.drain.asked = dist.get_rank() == 1
    before = [weight.clone() for weight in trainer.policy.parameters()]
    try:
        trainer.train(share_of(config, groups, seed=0), 1)
    except LeaveAgreed:
        return True, all(map(torch.equal, before, trainer.policy.parameters()))
    return False, False


def without_sums_of_copies(layout: Layout) -> Any:
    """Gradients without the sum over ranks of a replica that share a weight: norms of heads, tied embeddings."""
    config = recipe(layout, "dense", distributed=False)
    groups = layout.groups()
    trainer, _ = build(config, groups)
    with mock.patch.object(optimizer_module, "finalize_model_grads", lambda models: models[0].finish_grad_sync()):
        gradient(trainer, share_of(config, groups, seed=0))
    return boxes(trainer.policy, lambda weight: weight.main_grad)


def alone_of(rank: int, ranks: int, model: str) -> Seen:
    return seen(Layout(), model, Layout().groups())


def taught_alone(rank: int, ranks: int, cache: Path) -> Any:
    return taught(Layout(), cache)


class Whole(NamedTuple):
    """Observations of all ranks of a layout, put together."""

    logprobs: Tensor
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    after_sgd: dict[str, Tensor]
    losses: list[dict[str, float]]
    after_adam: dict[str, Tensor]

    @classmethod
    def of(cls, ranks: list[Seen]) -> Whole:
        assert all(each.losses == ranks[0].losses for each in ranks)
        return cls(
            torch.cat([each.logprobs for each in ranks if each.logprobs is not None]),
            whole(each.initial for each in ranks),
            whole(each.gradients for each in ranks),
            whole(each.after_sgd for each in ranks),
            ranks[0].losses,
            whole(each.after_adam for each in ranks),
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Run a function on several ranks, once for all tests. Returns the observations of each."""

    @functools.cache
    def run(ranks: int, sees: Callable[..., Any], *args: Any) -> list[dict[str, Any]]:
        return Ranks(tmp_path_factory.mktemp("ranks"), ranks, sees, *args).results(timeout_s=240)

    return run


@pytest.fixture(scope="module")
def in_layout(run: Any) -> Callable[[str], Whole]:
    @functools.cache
    def in_layout(name: str) -> Whole:
        return Whole.of([each[name] for each in run(LAYOUTS[name][1].ranks, layouts_of, name in QUICK)])

    return in_layout


@pytest.fixture(scope="module")
def alone(run: Any) -> Callable[[str], Whole]:
    return functools.cache(lambda model: Whole.of(run(1, alone_of, model)))


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Distance of two sets of tensors, relative to the norm of one."""
    assert one.keys() == other.keys()
    differences = [(one[name] - other[name]).norm() for name in one]
    return math.hypot(*differences) / math.hypot(*(tensor.norm() for tensor in one.values()))


def plain_model(layout: str) -> str:
    """Model of a layout, without what its ranks do differently."""
    model = LAYOUTS[layout][0]
    return PLAIN.get(model, model)


EXACT = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, (model, _) in LAYOUTS.items()
    if model != "bf16"
]


@pytest.mark.parametrize("name", EXACT)
def test_random_weights_are_the_same_in_every_layout(name: str, in_layout: Any, alone: Any) -> None:
    expected = alone(plain_model(name)).initial
    assert in_layout(name).initial.keys() == expected.keys()
    assert all(torch.equal(in_layout(name).initial[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", EXACT)
def test_logprobs_agree(name: str, in_layout: Any, alone: Any) -> None:
    expected = alone(plain_model(name)).logprobs
    assert expected.std() > 0.5  # otherwise any values would be close
    torch.testing.assert_close(in_layout(name).logprobs, expected, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", EXACT)
def test_gradients_and_a_step_of_sgd_agree(name: str, in_layout: Any, alone: Any) -> None:
    expected = alone(plain_model(name))
    assert distance(expected.gradients, in_layout(name).gradients) < CLOSE
    for key, whole_gradient in expected.gradients.items():  # separately: small ones are lost in the norm of all
        atol = 2 * CLOSE * float(whole_gradient.norm())
        torch.testing.assert_close(in_layout(name).gradients[key], whole_gradient, rtol=0, atol=atol)
    assert distance(expected.after_sgd, in_layout(name).after_sgd) < CLOSE


@pytest.mark.parametrize("name", EXACT)
def test_losses_of_adam_agree_over_two_steps(name: str, in_layout: Any, alone: Any) -> None:
    expected = alone(plain_model(name))
    for step, (ours, theirs) in enumerate(zip(in_layout(name).losses, expected.losses, strict=True)):
        assert ours == pytest.approx(theirs, rel=3e-5, abs=1e-5), f"step {step + 1}"
    assert distance(expected.after_adam, in_layout(name).after_adam) < 1e-4


@pytest.mark.parametrize("name", [name for name, (model, _) in LAYOUTS.items() if model == "bf16"])
def test_bf16_layouts_are_as_near_to_fp32_as_one_rank(name: str, in_layout: Any, alone: Any) -> None:
    """Each layout rounds at different operations; tensor-parallel ones also round their sums."""
    ours, expected, exact = in_layout(name), alone("bf16"), alone("dense")
    rounding = (expected.logprobs - exact.logprobs).norm()
    assert 0 < (ours.logprobs - exact.logprobs).norm() < 1.5 * rounding
    assert 0 < distance(exact.gradients, ours.gradients) < 1.5 * distance(exact.gradients, expected.gradients)
    for one, other in zip(ours.losses, expected.losses, strict=True):
        assert one["loss.loss"] == pytest.approx(other["loss.loss"], abs=0.05)  # where ratios are up to 10


def test_taught_base_model_is_the_same_in_every_layout(run: Any, cache: Path) -> None:
    expected = whole(run(1, taught_alone, cache))
    ours = whole(each["taught"] for each in run(4, more_of, cache))
    assert all(torch.equal(ours[key], expected[key]) for key in expected)


@pytest.mark.parametrize("copies", [0, 1], ids=["norms of heads", "tied embeddings"])
def test_comparison_detects_shared_weights_whose_gradients_are_not_summed(run: Any, cache: Path, copies: int) -> None:
    with pytest.raises(AssertionError, match="ranks differ"):
        whole(each["control"][copies] for each in run(2, more_of, cache))


def test_rank_asked_to_leave_ends_the_pass_on_all_ranks(run: Any, cache: Path) -> None:
    """Otherwise the other ranks would time out after 30 seconds and fail."""
    assert [each["asked"] for each in run(4, more_of, cache)] == [(True, True)] * 4
