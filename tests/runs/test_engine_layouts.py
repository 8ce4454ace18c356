"""An engine of several ranks gives the same answers as one rank, in any layout of training."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from checkpoint_helpers import run_ranks
from core_helpers import ALPHABET, END, VOCAB, tiny_model, tiny_run
from family_shapes import LATENT
from layout_helpers import fill, wrong_weights
from megatron.core import parallel_state

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.generate.engine.broadcast import INLINE, PlanBroadcast
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.generate.engine.scheduler import StepPlan
from megatron_rl.generate.refit.rank_engine import build_engine
from megatron_rl.generate.refit.rank_refit import ReshardedWeights
from megatron_rl.model.fused import FusedPolicy
from megatron_rl.model.grammar import Grammars
from megatron_rl.model.platform.layer_kernels import TorchKernels
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.inference import Sampling

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0, max_new_tokens=7)
CUT = Sampling(temperature=0.7, top_k=6, top_p=0.9, min_p=0.05, max_new_tokens=7)
TOKENIZER = CharacterTokenizer(ALPHABET)
SUM = f'start: /[0-9]{{1,2}}/ "+" /[2-6]{{2,3}}/ <[{END}]>\n' if find_spec("llguidance") else ""
PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3], [9, 9], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [4]]
LIMIT = timedelta(seconds=60)


@dataclass(frozen=True)
class Layout:
    """Layout of training, and the tensor parallel size of the engine."""

    engine: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    adapters: bool = False
    """Whether the model has adapters, which are trained alone."""
    fused: bool = False
    """Whether the engine has its own forward, as on a GPU."""
    latent: bool = False
    """Whether the model has latent attention."""

    @property
    def name(self) -> str:
        of_training = (
            f"TP{self.tp} PP{self.pp} EP{self.ep}" + " SP" * self.sequence_parallel + " adapters" * self.adapters
        )
        return f"{of_training} -> TP{self.engine}" + " fused" * self.fused + " latent" * self.latent

    @property
    def model(self) -> tuple[bool, bool, bool]:
        """Parts of the model."""
        return self.ep > 1, self.adapters, self.latent


LAYOUTS = {
    2: [
        Layout(engine=2, tp=2),
        Layout(engine=1, tp=2),
        Layout(engine=2, tp=2, sequence_parallel=True),
        Layout(engine=2, tp=2, sequence_parallel=True, fused=True),
        Layout(engine=2, pp=2),
        Layout(engine=2),
        Layout(engine=1, ep=2),
        Layout(engine=2, tp=2, adapters=True),
        Layout(engine=2, ep=2, adapters=True),
        Layout(engine=2, tp=2, latent=True),
        Layout(engine=1, tp=2, latent=True, adapters=True),
    ],
    4: [
        Layout(engine=2, tp=2),
        Layout(engine=2, tp=2, pp=2),
        Layout(engine=1, tp=2, pp=2),
        Layout(engine=2, tp=2, ep=2),
        Layout(engine=4, tp=4),  # each key/value head is on two ranks
        Layout(engine=1, tp=2, pp=2, adapters=True),
    ],
}
"""Layouts by number of ranks."""
SLOW = {2: [LAYOUTS[2][2], LAYOUTS[2][4], LAYOUTS[2][7]], 4: [LAYOUTS[4][0], LAYOUTS[4][2], LAYOUTS[4][3]]}
"""Layouts that combine what others show one by one."""


@dataclass(frozen=True)
class Seen:
    """Observations of one rank in a layout."""

    answers: dict[int, list[Completion]]
    """Answers of the requests that this rank drove, by request number."""
    wrong: list[str]
    """Weights that differ from those of the whole model after two publications."""
    moved_bytes: int
    tokens_of_experts: int
    """Share of the tokens routed to a layer's experts that they computed: each must compute its own."""
    tokens_routed: int


EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 32,
    "expert_bias": True,
    "dense_layers": 1,
    "shared_expert_ffn_hidden_size": 24,
    "shared_expert_gate": True,
    "router": {"score": "sigmoid", "correction_bias": True},
    "attention_sinks": True,
    "output_bias": True,
    "layer_types": ["sliding_attention", "linear_attention"],
    "sliding_window": 4,
    "delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 6, "value_head_dim": 8},
    "attention_gate": True,
}
"""Shape with unlike layers of both kinds."""


def recipe(layout: Layout, ranks: int) -> RunConfig:
    parts = EXPERTS if layout.ep > 1 else LATENT if layout.latent else {}
    training = {"tp": layout.tp, "pp": layout.pp, "ep": layout.ep, "sequence_parallel": layout.sequence_parallel}
    return tiny_run(
        job={"nodes": 1, "gpus_per_node": ranks, "device": "cpu"},
        model=tiny_model(**parts, lora={"rank": 2, "alpha": 2.0} if layout.adapters else None).model_dump(),
        placement={"training": training, "inference": {"tp": layout.engine}},
        inference={"max_batch": 5},
    )


def requests() -> list[GenerationRequest]:
    """Every third one is forced into a grammar."""
    return [
        GenerationRequest(prompt, 2, sampling, key=number, grammar="" if number % 3 else SUM)
        for number, (prompt, sampling) in enumerate((prompt, s) for prompt in PROMPTS for s in (GREEDY, CUT))
    ]


def answers(engine: Engine, ranks: EngineRanks) -> dict[int, list[Completion]]:
    """Answer this rank's share of the requests, all at the same time; ranks that follow have none."""
    if not ranks.drives:
        engine.follow(nullcontext)
        return {}
    share = [*enumerate(requests())][ranks.index :: ranks.count]

    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*(engine.generate(each) for _, each in share)), timeout=60)

    completions = asyncio.run(together())
    engine.release_followers()
    return {number: found for (number, _), found in zip(share, completions, strict=True)}


def see(layout: Layout, world: int) -> Seen:
    config = recipe(layout, world)
    platform: Any = select(config.job)
    platform.kernels.layer_kernels = TorchKernels("a test") if layout.fused else None
    groups = Groups.from_megatron(LIMIT)
    ranks = EngineRanks.form(groups, layout.engine, LIMIT)
    platform.seed(3)
    trained = build_policy(config.model, VOCAB, platform, sequence_parallel=layout.sequence_parallel)
    engine, refit = build_engine(trained, config, VOCAB, {END}, platform, groups, ranks, TOKENIZER)
    assert isinstance(engine.policy.frozen(), FusedPolicy) == layout.fused
    if isinstance(refit, ReshardedWeights):  # in several rounds, since the model is smaller than one
        refit = ReshardedWeights(trained, engine, groups, round_bytes=5000)
    for version in (1, 2):
        fill(trained, version)
        refit.publish(version)
    wrong = wrong_weights(engine.policy, version=2)
    of_experts, routed = count_tokens(engine.policy, config.model.experts_per_token)
    found = answers(engine, ranks)
    return Seen(found, wrong, refit.moved_bytes, sum(of_experts), sum(routed))


def count_tokens(policy: Policy, experts_per_token: int | None) -> tuple[list[int], list[int]]:
    """Lists that every pass extends: tokens that reach the experts of the last layer, and tokens routed to them."""
    of_experts: list[int] = []
    routed: list[int] = []
    if experts_per_token:
        layer = policy.decoder.layers[-1].mlp
        layer.experts.register_forward_pre_hook(lambda _, inputs: of_experts.append(len(inputs[0])))
        layer.register_forward_pre_hook(lambda _, inputs: routed.append(experts_per_token * len(inputs[0])))
    return of_experts, routed


def plans() -> list[StepPlan | None]:
    """Plans that fit in one message, that do not, and that almost do."""
    prompts = (
        Prefill([1] * length, 0, [], [0, 3], [4, 5], [2], [-0.5], 2**63, CUT) for length in (*range(300, 420), 5000)
    )
    return [
        None,
        StepPlan([(7, 0), (8, 2)], [(1, 2, 3)], range(3), []),
        *(StepPlan([], [], range(1, 3), [each]) for each in prompts),
    ]


def broadcast(rank: int, world: int) -> list[StepPlan | None]:
    assert dist.group.WORLD is not None
    channel = PlanBroadcast(dist.group.WORLD)
    if rank > 0:
        return [channel.receive() for _ in plans()]
    for plan in plans():
        channel.send(plan)
    return plans()


def see_all(rank: int, world: int, layouts: list[Layout]) -> list[Seen]:
    seen = []
    for layout in layouts:
        parallel_state.initialize_model_parallel(layout.tp, layout.pp, expert_model_parallel_size=layout.ep)
        seen.append(see(layout, world))
        parallel_state.destroy_model_parallel()
    return seen


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Layout], list[Seen]]:
    @functools.cache
    def of_all(world: int, slow: bool) -> dict[Layout, list[Seen]]:
        layouts = [layout for layout in LAYOUTS[world] if (layout in SLOW[world]) == slow]
        of_ranks = run_ranks(tmp_path_factory.mktemp("ranks"), world, see_all, layouts)
        return {layout: [*each] for layout, each in zip(layouts, zip(*of_ranks, strict=True), strict=True)}

    return lambda world, layout: of_all(world, layout in SLOW[world])[layout]


@pytest.fixture(scope="module")
def alone(platform: Any, groups: Any) -> dict[tuple[bool, bool, bool], dict[int, list[Completion]]]:
    """Answers of one rank with each model."""
    found = {}
    for layout in {layout.model: layout for layouts in LAYOUTS.values() for layout in layouts}.values():
        config = recipe(replace(layout, engine=1, tp=1, pp=1, sequence_parallel=False), ranks=1)
        policy = build_policy(config.model, VOCAB, platform)
        fill(policy, version=2)
        ranks = EngineRanks.form(groups, 1, LIMIT)
        engine = Engine(policy.eval(), config.model, config.inference, {END}, ranks=ranks)
        engine.policy_version, engine.grammars.source = 2, Grammars(TOKENIZER)
        found[layout.model] = answers(engine, ranks)
    return found


ALL = [
    pytest.param(
        world, layout, id=f"{world} ranks, {layout.name}", marks=pytest.mark.slow if layout in SLOW[world] else ()
    )
    for world, layouts in LAYOUTS.items()
    for layout in layouts
]


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_engine_has_the_weights_of_the_trainer_bit_for_bit(world: int, layout: Layout, seen: Any) -> None:
    assert [each.wrong for each in seen(world, layout)] == [[]] * world


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_tokens_equal_those_of_one_rank_with_the_whole_model(world: int, layout: Layout, seen: Any, alone: Any) -> None:
    expected = alone[layout.model]
    together: dict[int, list[Completion]] = {}
    for rank, each in enumerate(seen(world, layout)):
        assert bool(each.answers) == (rank % layout.engine == 0)  # the first rank of each replica drives
        together |= each.answers
    assert together.keys() == expected.keys()
    for number, completions in expected.items():
        for ours, theirs in zip(together[number], completions, strict=True):
            assert ours.tokens == theirs.tokens
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
            assert (ours.versions, ours.finish_reason) == (theirs.versions, theirs.finish_reason)
    tokens = {token for completions in expected.values() for one in completions for token in one.tokens}
    assert len(tokens) > 5  # the model does not give the same answer to everything


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_nothing_is_sent_that_a_rank_already_has(world: int, layout: Layout, seen: Any) -> None:
    """Half of the model if a rank trains half of the layers and generates with all; nothing in the same layout."""
    moved = {each.moved_bytes for each in seen(world, layout)}
    assert len(moved) == 1
    same = layout.tp == layout.engine and layout.pp == layout.ep == 1
    assert (moved == {0}) == (same or (layout.tp, layout.pp, layout.ep) == (1, 1, 1))


@pytest.mark.parametrize(("world", "layout"), [each for each in ALL if each.values[1].ep > 1])
def test_experts_get_every_token_once(world: int, layout: Layout, seen: Any) -> None:
    """Even if ranks that share each expert have the same tokens."""
    for each in seen(world, layout):
        assert each.tokens_of_experts == each.tokens_routed > 0


def test_plan_of_any_size_is_the_same_on_every_rank(tmp_path: Path) -> None:
    received = run_ranks(tmp_path, 2, broadcast)
    assert received == [plans()] * 2
    sizes = [len(pickle.dumps(plan)) for plan in plans()]
    assert min(sizes) < INLINE - 100 < INLINE + 100 < max(sizes)
