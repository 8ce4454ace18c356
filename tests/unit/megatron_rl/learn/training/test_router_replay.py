"""Training with the experts that the engine chose, or that the first pass over a micro-batch chose."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from core_helpers import END, batch_of, build_run, tiny_model, tiny_run
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import AnswerPrefix, Completion, GenerationRequest
from megatron_rl.model.router_replay import FirstChoices, GivenChoices, ReplayTally
from megatron_rl.rank.metrics.stats import StepStats, Tally
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.run.state import Run

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "tied_embeddings": False}
PROMPTS = [[1, 10, 2, 12], [7, 3, 3], [5, 11, 5, 12, 0, 3, 3], [0, 1, 2, 3, 4, 5]]


def run_of(platform: Any, groups: Any, replay: str, grpo: dict[str, Any] | None = None, **model: Any) -> Run:
    shape = tiny_model(**EXPERTS | {"router_replay": replay} | model).model_dump()
    sections = {"grpo": {"importance": {"upper": 2.0}} | (grpo or {}), "training": {"recompute": "full"}}
    run = build_run(tiny_run(model=shape, sampling={"max_new_tokens": 12}, **sections), platform, groups)
    with torch.no_grad():
        for router in routers(run):
            router.mul_(0.05)  # scores of experts are nearly equal
    reload(run)
    return run


def routers(run: Run) -> list[Tensor]:
    return [weight for name, weight in run.trainer.policy.named_parameters() if "router" in name]


def reload(run: Run) -> None:
    run.trainer.optimizer.reload()
    run.trainer.optimizer.megatron.reload_model_params()
    run.trainer.optimizer.offload()


def perturb(run: Run, seed: int = 3) -> None:
    """Move the routers as rounding would, so that some of their choices change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for router in routers(run):
            router.add_(0.03 * router.std() * torch.randn(router.shape, generator=generator))
    reload(run)


def sampled(run: Run, begun: Sequence[TrajectoryGroup] = ()) -> list[TrajectoryGroup]:
    """Answers of the engine to each prompt, with rewards that differ.

    begun: answers whose first half is known, but not its choices, as vLLM returns nothing of an answer that it did not
        end.
    """
    engine = Engine(run.trainer.policy, run.trainer.config.model, InferenceConfig(max_batch=16), {END})
    asked = [GenerationRequest(prompt, 4, Sampling(max_new_tokens=12), key) for key, prompt in enumerate(PROMPTS)]
    for number, group in enumerate(begun):
        known = {at: halved(each) for at, each in enumerate(group.trajectories)}
        asked[number] = replace(asked[number], known=known)

    async def together() -> list[list[Completion]]:
        return await asyncio.gather(*map(engine.generate, asked))

    found = []
    for number, completions in enumerate(asyncio.run(together())):
        answers = [Trajectory.single(PROMPTS[number], one, "", at % 2) for at, one in enumerate(completions)]
        found.append(TrajectoryGroup(number, Problem("", {}), answers, {}))
    return found


def halved(answer: Trajectory) -> AnswerPrefix:
    start, count = answer.prompt_length, (len(answer.tokens) - answer.prompt_length) // 2
    part = slice(start, start + count)
    return AnswerPrefix(answer.tokens[part], answer.logprobs[part], answer.versions[part], [])


def without_first_choices(
    resumed: Sequence[TrajectoryGroup], begun: Sequence[TrajectoryGroup]
) -> list[TrajectoryGroup]:
    """The first half of each answer loses its choices."""
    found = []
    for group, other in zip(resumed, begun, strict=True):
        changed = []
        for answer, first in zip(group.trajectories, other.trajectories, strict=True):
            start, count = first.prompt_length, len(halved(first).tokens)
            choices = [*answer.choices[:start], *[b""] * count, *answer.choices[start + count :]]
            changed.append(replace(answer, choices=choices))
        found.append(replace(group, trajectories=changed))
    return found


def trained(run: Run, groups: Sequence[TrajectoryGroup]) -> StepStats:
    stats = run.trainer.train(batch_of([*groups], 0, len(groups)), 1)
    tally = Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total)


def difference(stats: StepStats) -> float:
    """Mean difference of log-probs between training and engine."""
    assert stats.loss is not None
    return float(stats.loss.inference_difference / stats.loss.tokens)


def of_router(stats: StepStats) -> Any:
    assert stats.router is not None
    return stats.router


def without_choices(groups: Sequence[TrajectoryGroup], answers: int) -> list[TrajectoryGroup]:
    """The first answers of each group lose their choices, as if their replica had been lost."""
    found = []
    for group in groups:
        lost = [replace(one, choices=[]) for one in group.trajectories[:answers]]
        found.append(replace(group, trajectories=lost + group.trajectories[answers:]))
    return found


def test_with_replay_a_perturbed_router_moves_log_probs_no_more_than_that_of_a_model_without_choices(
    platform: Any, groups: Any
) -> None:
    runs = {replay: run_of(platform, groups, replay) for replay in ("rollout", "off")}
    dense = run_of(platform, groups, "rollout", experts_per_token=8)
    answers, of_dense = sampled(runs["rollout"]), sampled(dense)
    for run in (*runs.values(), dense):
        perturb(run)
    replayed, own = (trained(run, answers) for run in runs.values())
    all_chosen = trained(dense, of_dense)
    assert difference(replayed) < 2 * difference(all_chosen)
    assert difference(own) > 10 * difference(replayed)
    assert own.router is None
    assert 0.005 < of_router(replayed).differing / of_router(replayed).replayed < 0.2
    assert of_router(replayed).missing == 0
    assert of_router(all_chosen).differing == 0


def test_replaying_the_routers_own_choices_changes_no_bit_of_the_update(platform: Any, groups: Any) -> None:
    runs = [run_of(platform, groups, replay) for replay in ("rollout", "off")]
    answers = sampled(runs[0])
    before = [router.clone() for router in routers(runs[0])]
    replayed, own = (trained(run, answers) for run in runs)
    assert of_router(replayed).replayed > 0
    assert (of_router(replayed).differing, of_router(replayed).missing) == (0, 0)
    assert (replayed.loss, replayed.update) == (own.loss, own.update)
    for one, other in zip(*(run.trainer.policy.parameters() for run in runs), strict=True):
        assert torch.equal(one, other)
    assert not any(map(torch.equal, before, routers(runs[0]))), "gradients reach the routers"


def test_tokens_whose_choices_were_lost_are_counted_and_use_their_router(platform: Any, groups: Any) -> None:
    run, bare = (run_of(platform, groups, "rollout") for _ in range(2))
    off = run_of(platform, groups, "off")
    answers = sampled(run)
    for each in (run, bare, off):
        perturb(each)
    some = trained(run, without_choices(answers, 2))
    lost = [one for group in answers for one in group.trajectories[:2]]
    assert 0 < of_router(some).missing <= sum(len(one.tokens) - 1 - one.prompt_length for one in lost)
    none = trained(bare, without_choices(answers, 4))
    assert none.loss == trained(off, answers).loss
    assert of_router(none).replayed == 0
    assert of_router(none).missing == none.batch.packed_tokens


def test_a_resumed_answer_is_nearer_with_the_choices_of_a_later_version_than_without(
    platform: Any, groups: Any
) -> None:
    """The version that ends an answer of vLLM chooses for all of its tokens, those of an earlier version included. Its
    own tokens have seen these choices, and for the earlier ones they are nearer than those of the version that
    trains."""
    runs = [run_of(platform, groups, "rollout") for _ in range(2)]
    begun = sampled(runs[0])
    for run in runs:
        perturb(run, seed=3)
    resumed = sampled(runs[0], begun)
    for run in runs:
        perturb(run, seed=4)
    batches = (resumed, without_first_choices(resumed, begun))
    later, without = (trained(run, batch) for run, batch in zip(runs, batches, strict=True))
    assert of_router(later).missing == 0
    assert of_router(without).missing > 0
    assert difference(later) < 0.7 * difference(without)


def test_old_keeps_the_choices_of_the_pass_that_computed_old_log_probs(platform: Any, groups: Any) -> None:
    run = run_of(platform, groups, "old", grpo={"iterations": 3})
    for group in run.trainer.optimizer.megatron.param_groups:
        group["lr"] = 0.1
    stats = trained(run, sampled(run))
    assert of_router(stats).differing > 0
    assert of_router(stats).missing == 0


def test_old_replays_nothing_but_recomputed_layers_in_a_step_with_a_single_update(platform: Any, groups: Any) -> None:
    run = run_of(platform, groups, "old")
    stats = of_router(trained(run, sampled(run)))
    assert stats.differing == 0
    assert stats.replayed > 0


SCORES = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.3, 0.2, 0.1], [0.2, 0.1, 0.4, 0.3]])


def test_first_choices_are_those_of_each_layers_first_pass() -> None:
    tally = ReplayTally.on(torch.device("cpu"))
    replay = FirstChoices(2, tally)
    first = replay.choose(1, SCORES)
    assert replay.choose(2, -SCORES).tolist() != first.tolist()
    assert replay.choose(1, -SCORES).tolist() == first.tolist()
    assert tally.counts.tolist() == [3, 3]


def test_ranks_of_sequence_parallelism_replay_their_own_tokens() -> None:
    given = torch.tensor([[[0, 1]], [[2, 3]], [[0, 3]]], dtype=torch.uint8)
    known = torch.tensor([True, True, False])
    tally = ReplayTally.on(torch.device("cpu"))
    parts = [GivenChoices(given, known, {1: 0}, tally, part).choose(1, SCORES[:2]).tolist() for part in (0, 1)]
    assert parts == [[[0, 1], [2, 3]], [[1, 2], [0, 1]]]  # the second has an unknown token and one of padding
    assert tally.counts.tolist() == [2, 2]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"grpo": {"iterations": 2, "global_batch": 8}, "model": {"router_replay": "old"}},
            "old with grpo.iterations 2",
        ),
        ({"inference": {"engine": "vllm", "share_prefixes": False}}, "set share_prefixes to true"),
        ({"inference": {"engine": "vllm"}, "sampling": {"stop": ["x"]}}, "answers that it ends itself"),
    ],
)
def test_a_recipe_whose_choices_cannot_be_replayed_is_refused(sections: dict[str, Any], said: str) -> None:
    shape = EXPERTS | {"router_replay": "rollout", "qkv_bias": False, "qk_norm": True, "head_dim": 32}
    partitioned = {
        "job": {"nodes": 2, "gpus_per_node": 1, "device": "cpu"},
        "placement": {"mode": "partitioned", "inference": {"nodes": 1}},
        "resume": {"partial": "keep"},
    }
    model = shape | sections.pop("model", {})
    with pytest.raises(ValueError, match=said):
        tiny_run(model=model, **(partitioned if "inference" in sections else {}), **sections)
