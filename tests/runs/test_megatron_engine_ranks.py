"""megatron-core's engine on several ranks: all of them draw the same tokens, step by step."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_helpers import run_ranks
from core_helpers import END, VOCAB, stir, tiny_model, tiny_run
from megatron.core import parallel_state
from megatron_engine_on_cpu import megatron_engine_on_cpu

from megatron_rl.generate.engine.interface import Completion, GenerationRequest, RankEngine
from megatron_rl.generate.refit.rank_engine import build_engine
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.select import select
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.rank.engine_ranks import EngineRanks
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.inference import Sampling

LIMIT = timedelta(seconds=60)
PROMPTS = [[1, 10, 2, 12], [7], [5, 11, 5, 12, 0, 3, 3], [9, 9]]
SAMPLINGS = [Sampling(temperature=0.0, max_new_tokens=12, stop_tokens=(3,)), Sampling(max_new_tokens=12, top_p=0.9)]


def answers(engine: RankEngine, ranks: EngineRanks) -> list[list[Completion]]:
    """Run a phase, and return the answers on the driving rank and the following one."""
    requests = [GenerationRequest(prompt, 2, sampling, key=7) for prompt in PROMPTS for sampling in SAMPLINGS]

    async def together() -> list[list[Completion]]:
        return await asyncio.wait_for(asyncio.gather(*map(engine.generate, requests)), timeout=120)

    found: list[list[Completion]] = []
    if ranks.drives:
        found = asyncio.run(together())
        engine.release_followers()
    else:
        engine.follow(nullcontext)
    engine.end_phase()
    shared = [found]
    dist.broadcast_object_list(shared, group=ranks.control, group_src=0)
    return shared[0]


@torch.no_grad()
def most_off(policy: Policy, prompt: list[int], one: Completion) -> float:
    """Return the largest difference between its log-probs and those of the training forward."""
    tokens = torch.tensor([*prompt, *one.tokens])
    logits = policy(tokens, torch.arange(len(tokens)), policy.layout(whole_sequences([len(tokens)])))
    logprobs = policy.whole_logits(logits)[len(prompt) - 1 : -1].log_softmax(-1)
    chosen = logprobs.gather(1, tokens[len(prompt) :, None]).squeeze(1)
    return float((chosen - torch.tensor(one.logprobs)).abs().max())


def on_two_ranks(rank: int, world: int) -> tuple[list[list[Completion]], list[list[Completion]], float]:
    parallel_state.initialize_model_parallel(world)
    config = tiny_run(
        job={"nodes": 1, "gpus_per_node": world, "device": "cpu"},
        model=tiny_model().model_dump(),
        placement={"training": {"tp": world}},
        inference={"max_batch": 6, "page_tokens": 4},
    )
    platform = select(config.job)
    groups = Groups.from_megatron(LIMIT)
    ranks = EngineRanks.form(groups, world, LIMIT)
    platform.seed(3)
    policy = build_policy(config.model, VOCAB, platform)
    stir(policy, 0.15)
    for weight in policy.parameters():  # weights that are not split are the same
        if not getattr(weight, "tensor_model_parallel", False):
            dist.broadcast(weight.detach(), 0)
    found = []
    for engine_name in ("native", "megatron"):
        inference = config.inference.model_copy(update={"engine": engine_name})
        chosen = config.model_copy(update={"inference": inference})
        with megatron_engine_on_cpu():
            engine, _ = build_engine(policy, chosen, VOCAB, {END}, platform, groups, ranks)
            found.append([answers(engine, ranks) for _ in range(2)][1])  # its second phase
    sampled = [(PROMPTS[number // 2], one) for number, two in enumerate(found[1]) if number % 2 for one in two]
    return found[0], found[1], max(most_off(policy, prompt, one) for prompt, one in sampled)


def test_two_ranks_answer_as_the_native_engine_does_on_them(tmp_path: Path) -> None:
    for native, megatron, off in run_ranks(tmp_path, 2, on_two_ranks):
        greedy = [[[one.tokens for one in two] for two in answers[::2]] for answers in (native, megatron)]
        assert greedy[0] == greedy[1]
        assert {one.finish_reason for two in megatron for one in two} == {"stop", "length"}
        assert off < 1e-5  # if the ranks drew different tokens, their caches would disagree
