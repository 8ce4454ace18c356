"""Step times and whole runs, estimated on the possible splits of an allocation's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.cluster.profile import Profile
from launcher.plan.costs import Scenario, Split, Work
from launcher.plan.estimate import AS_ESTIMATED, Correction, corrected, estimate_costs
from launcher.plan.failures import ExpectedRun, Faults, expect
from launcher.plan.gpu_memory import rank_memories
from launcher.plan.pace import Pace, pace
from launcher.plan.placement import Plan, place
from launcher.plan.sizes import LayoutError
from launcher.plan.summary import gpu_bytes, with_offload
from launcher.plan.turn_times import turn_seconds
from megatron_rl.recipe.cards import Card
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_turns import Act
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.fixed_models import fixed_models
from megatron_rl.recipe.job import PlacementConfig

MOST_SPLITS = 8
"""Largest number of splits that are compared; of a larger allocation they are evenly spaced."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    config: RunConfig
    work: Work
    card: Card
    vocab: int
    basis: str
    """Source of the speeds, as a phrase: "estimated for H100"."""
    correction: Correction = AS_ESTIMATED
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    split: Split
    paces: Mapping[int, Pace]
    lacks_bytes: int
    scenarios: Mapping[int, Scenario]
    turn_s: Mapping[Act, float]
    """Seconds of each act between generating and training on shared devices; empty on others."""


def compare(assumed: Assumptions, nodes: int, lags: Sequence[int]) -> list[Candidate]:
    """Estimate co-located ranks and up to MOST_SPLITS possible splits of `nodes` nodes at each lag, as far as the
    engine can run them."""
    found = []
    for inference_nodes in _inference_nodes(assumed.config, nodes):
        laid_out = lay_out(assumed.config, nodes, inference_nodes, assumed.profile)
        if laid_out is not None:
            found.append(_candidate(assumed, *laid_out, lags))
    return found


def best(candidates: Sequence[Candidate], lag: int) -> Candidate | None:
    fitting = [one for one in candidates if not one.lacks_bytes]
    return min(fitting, key=lambda one: one.paces[lag].step_s, default=None)


def expect_runs(
    candidates: Sequence[Candidate], lags: Sequence[int], faults: Faults, steps: int, save_every: int | None
) -> Iterator[tuple[Scenario, ExpectedRun]]:
    """Yield a run at each lag on co-located ranks, and on the fastest split, as far as they fit.

    Args:
        save_every: steps; None: the interval that `save.every: auto` would choose.
    """
    colocated = [one for one in candidates if one.split.colocated and not one.lacks_bytes]
    choices = [(lag, one) for one in colocated for lag in lags]
    partitioned = [one for one in candidates if not one.split.colocated]
    choices += [(lag, fastest) for lag in lags if (fastest := best(partitioned, lag)) is not None]
    for lag, one in choices:
        yield one.scenarios[lag], expect(one.scenarios[lag], one.paces[lag], faults, steps, save_every)


def lay_out(
    config: RunConfig, nodes: int, inference_nodes: int, profile: Profile | None
) -> tuple[RunConfig, Plan] | None:
    """Return the recipe for a split and its plan, or None if the split has no valid layout.

    Args:
        inference_nodes: 0: co-located.
    """
    inference = config.placement.inference.model_copy(update={"nodes": inference_nodes or None})
    mode = "partitioned" if inference_nodes else "colocated"
    placement: PlacementConfig = config.placement.model_copy(update={"mode": mode, "inference": inference})
    job = config.job.model_copy(update={"nodes": nodes})
    try:
        node_gpus = profile.gpus_per_node if profile else None
        plan = place(
            job,
            placement,
            node_gpus,
            config.model,
            config.inference.engine,
            fixed_models(config.distill, config.reward),
        )
    except LayoutError:
        return None
    if config.grpo.prompts_per_step < plan.sizes.dp:
        return None  # each data-parallel replica needs a prompt
    return with_offload(config.model_copy(update={"job": job, "placement": placement}), plan, profile), plan


def scenario_of(assumed: Assumptions, config: RunConfig, plan: Plan, max_lag: int) -> Scenario:
    sizes, bandwidth = plan.sizes, assumed.profile.fs_bandwidth if assumed.profile else None
    written = bandwidth * 1e9 if bandwidth else None
    costs = estimate_costs(config, sizes, assumed.vocab, assumed.card, assumed.work, written)
    split = Split(sizes.training_nodes, sizes.inference_nodes, sizes.replicas)
    return Scenario(assumed.work, corrected(costs, assumed.correction), split, max_lag)


def _candidate(assumed: Assumptions, config: RunConfig, plan: Plan, lags: Sequence[int]) -> Candidate:
    sizes, limit = plan.sizes, gpu_bytes(config, assumed.profile)
    memories = rank_memories(config, sizes, assumed.vocab)
    scenarios = {lag: scenario_of(assumed, config, plan, lag) for lag in lags}
    return Candidate(
        split=Split(sizes.training_nodes, sizes.inference_nodes, sizes.replicas),
        paces={lag: pace(scenario) for lag, scenario in scenarios.items()},
        lacks_bytes=max(0, *(one.total - int(limit * one.share) for one in memories)) if limit else 0,
        scenarios=scenarios,
        turn_s=turn_seconds(config, sizes, assumed.vocab, assumed.card) if sizes.shares_devices else {},
    )


def _inference_nodes(config: RunConfig, nodes: int) -> list[int]:
    """Numbers of inference nodes to compare; 0: co-located."""
    every, able = -(-nodes // MOST_SPLITS), capabilities_of(config.inference.engine)
    asked = config.placement.inference.nodes
    counts = {0}
    if able.own_replicas:
        counts |= {*range(every, nodes, every)} | ({asked} if asked and asked < nodes else set())
    return sorted(counts)
