"""Which split of an allocation's nodes takes least time: each is simulated without faults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.cluster.profile import Profile
from launcher.plan.gpu_memory import rank_memories
from launcher.plan.placement import LayoutError, Plan, place
from launcher.plan.summary import gpu_bytes, with_offload
from launcher.simulate.estimate import AS_ESTIMATED, Correction, corrected, estimate_costs
from launcher.simulate.run import simulate
from launcher.simulate.scenario import Scenario, Split, Work
from megatron_rl.config import RunConfig
from megatron_rl.platform.cards import Card
from megatron_rl.rank.config import PlacementConfig

MOST_SPLITS = 8
"""That are looked at; of a larger allocation as many, evenly spaced."""
STEPS = 3
"""That are looked at of each, after the first ones, in which generation gets its lead."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is known of a recipe's work and speed."""

    config: RunConfig
    work: Work
    card: Card
    vocab: int
    basis: str
    """Where the speeds are from, in words."""
    correction: Correction = AS_ESTIMATED
    profile: Profile | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """A run in its steady state."""

    step_s: float
    tokens_per_s: float
    train_s: float
    """Seconds of a step in which the training world trains."""
    refit_s: float
    """... in which weights are on their way and it does not."""
    generate_s: float
    """... in which a replica computes, mean over the replicas."""
    idle_training: float
    """Share of the time; where co-located, of the ranks that do both."""
    idle_inference: float


@dataclass(frozen=True, slots=True)
class Candidate:
    """A split, how fast it is, and whether the GPUs have room for it."""

    split: Split
    paces: Mapping[int, Pace]
    """By lag; of co-located ranks by 0 alone."""
    lacks_bytes: int
    """By which the fullest GPU is too small, as estimated; 0: it is not."""

    def at(self, lag: int) -> Pace:
        """How fast it is at this lag; co-located ranks have none."""
        return self.paces[0 if self.split.colocated else lag]


def compare(assumed: Assumptions, nodes: int, lags: Sequence[int], seed: int = 0) -> list[Candidate]:
    """Co-located and each split that is possible, but for MOST_SPLITS."""
    found = []
    for inference_nodes in _inference_nodes(assumed.config, nodes):
        laid_out = lay_out(assumed.config, nodes, inference_nodes, assumed.profile)
        if laid_out is not None:
            found.append(_candidate(assumed, *laid_out, lags, seed))
    return found


def best(candidates: Sequence[Candidate], lag: int) -> Candidate | None:
    """The fastest at this lag among those that the GPUs have room for; co-located ranks count at any."""
    fitting = [one for one in candidates if not one.lacks_bytes]
    return min(fitting, key=lambda one: one.at(lag).step_s, default=None)


def lay_out(
    config: RunConfig, nodes: int, inference_nodes: int, profile: Profile | None
) -> tuple[RunConfig, Plan] | None:
    """The recipe, and who does what, on a split; None where it gives no layout.

    Args:
        inference_nodes: 0: co-located.
    """
    inference = config.placement.inference.model_copy(update={"nodes": inference_nodes or None})
    mode = "partitioned" if inference_nodes else "colocated"
    placement: PlacementConfig = config.placement.model_copy(update={"mode": mode, "inference": inference})
    job = config.job.model_copy(update={"nodes": nodes})
    try:
        plan = place(job, placement, profile.gpus_per_node if profile else None, config.model)
    except LayoutError:
        return None
    if config.grpo.prompts_per_step < plan.sizes.dp:
        return None  # each data-parallel replica needs a prompt
    return with_offload(config.model_copy(update={"job": job, "placement": placement}), plan, profile), plan


def scenario_of(assumed: Assumptions, config: RunConfig, plan: Plan, max_lag: int) -> Scenario:
    """What a run on this layout is like. Without saves and faults."""
    sizes, bandwidth = plan.sizes, assumed.profile.fs_bandwidth if assumed.profile else None
    written = bandwidth * 1e9 if bandwidth else None
    costs = estimate_costs(config, sizes, assumed.vocab, assumed.card, assumed.work, written)
    split = Split(sizes.training_nodes, sizes.inference_nodes, sizes.replicas)
    return Scenario(assumed.work, corrected(costs, assumed.correction), split, max_lag)


def pace(scenario: Scenario, seed: int = 0, steps: int = STEPS) -> Pace:
    """Of `steps` steps, once generation has its lead."""
    lead = 2 * scenario.max_lag
    done = simulate(scenario, lead + steps, seed).steps
    counted = done[lead:]
    seconds = done[-1].ended_at - (done[lead - 1].ended_at if lead else 0.0)
    idle_training = max(0.0, 1 - sum(step.trained_s + step.sent_s for step in counted) / seconds)
    idle_inference = max(0.0, 1 - sum(step.generated_s for step in counted) / seconds)
    if scenario.split.colocated:
        idle_training = idle_inference = max(0.0, idle_training + idle_inference - 1)
    return Pace(
        step_s=seconds / len(counted),
        tokens_per_s=sum(step.tokens for step in counted) / seconds,
        train_s=sum(step.trained_s for step in counted) / len(counted),
        refit_s=sum(step.sent_s for step in counted) / len(counted),
        generate_s=sum(step.generated_s for step in counted) / len(counted),
        idle_training=idle_training,
        idle_inference=idle_inference,
    )


def _candidate(assumed: Assumptions, config: RunConfig, plan: Plan, lags: Sequence[int], seed: int) -> Candidate:
    sizes, limit = plan.sizes, gpu_bytes(config, assumed.profile)
    needed = max(memory.total for memory in rank_memories(config, sizes, assumed.vocab))
    return Candidate(
        split=Split(sizes.training_nodes, sizes.inference_nodes, sizes.replicas),
        paces={
            lag: pace(scenario_of(assumed, config, plan, lag), seed) for lag in (lags if sizes.partitioned else (0,))
        },
        lacks_bytes=max(0, needed - limit) if limit else 0,
    )


def _inference_nodes(config: RunConfig, nodes: int) -> list[int]:
    """How many of the nodes only generate; 0: co-located."""
    every = -(-nodes // MOST_SPLITS)
    counts = {0, *range(every, nodes, every)}
    asked = config.placement.inference.nodes
    return sorted(counts | ({asked} if asked and asked < nodes else set()))
