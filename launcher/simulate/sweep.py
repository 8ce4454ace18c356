"""One recipe on ever more nodes: co-located, and on the best split at each lag, with all that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from launcher.simulate.outcome import Outcome
from launcher.simulate.run import simulate
from launcher.simulate.scenario import Costs, Faults, Split
from launcher.simulate.splits import Assumptions, Candidate, compare, lay_out, pace, scenario_of
from megatron_rl.checkpoint.interval import PRIOR_S, Cost, best_interval_s

FIGURES: dict[str, Callable[[Outcome], float]] = {
    "step_s": lambda done: done.step_s,
    "steps_per_hour": lambda done: done.steps_per_hour,
    "tokens_per_s": lambda done: done.tokens_per_s,
    "goodput": lambda done: done.goodput,
    "idle_training": lambda done: done.idle_training,
    "idle_inference": lambda done: done.idle_inference,
    "staleness": lambda done: done.staleness,
    "staleness_max": lambda done: done.staleness_max,
    "attempts": lambda done: done.attempts,
    "repeated_steps": lambda done: done.repeated,
    "lost_replicas": lambda done: done.lost_replicas,
}
"""What is told of a simulation; outcome.py says what each is."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over all seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Point:
    """A split at one lag, on one count of nodes."""

    nodes: int
    gpus: int
    prompts: int
    """Of a step."""
    split: Split
    max_lag: int
    save_every: int
    """Steps."""
    figures: Mapping[str, Spread]
    """By their names in FIGURES."""

    @property
    def mode(self) -> str:
        """`co-located`, or `lag 1`: points of one mode make a line of a chart."""
        return "co-located" if self.split.colocated else f"lag {self.max_lag}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is to be simulated of a recipe."""

    nodes: Sequence[int]
    lags: Sequence[int]
    steps: int
    seeds: int
    faults: Faults
    grow_batch: bool
    """Whether prompts of a step grow with the nodes; else they are the recipe's on any count."""

    def points(self, assumed: Assumptions) -> Iterator[Point]:
        """On each count of nodes co-located ranks, and at each lag the fastest split, as far as there is a layout that
        fits."""
        for nodes in self.nodes:
            grown = self._on(assumed, nodes)
            for lag, inference_nodes in self._choices(assumed, grown, nodes):
                yield self._point(grown, nodes, inference_nodes, lag)

    def _on(self, assumed: Assumptions, nodes: int) -> Assumptions:
        """What is known where there are so many nodes."""
        base, grpo = assumed.config.job.most_nodes, assumed.config.grpo
        if not self.grow_batch:
            return assumed
        of_step = grpo.model_copy(
            update={
                "prompts_per_step": grpo.prompts_per_step * nodes // base,
                "global_batch": grpo.global_batch and grpo.global_batch * nodes // base,
            }
        )
        work = replace(assumed.work, prompts=of_step.prompts_per_step)
        return replace(assumed, config=assumed.config.model_copy(update={"grpo": of_step}), work=work)

    def _choices(self, assumed: Assumptions, grown: Assumptions, nodes: int) -> Iterator[tuple[int, int]]:
        """(lag, nodes that only generate). A batch that grows with the nodes wants the same shares of them."""
        base = assumed.config.job.most_nodes if self.grow_batch else nodes
        fitting = [
            one for one in compare(assumed if self.grow_batch else grown, base, self.lags) if not one.lacks_bytes
        ]
        if any(one.split.colocated for one in fitting):
            yield 0, 0
        apart = [one for one in fitting if not one.split.colocated]
        for lag in self.lags if apart else ():
            fastest = _fastest(apart, lag).split
            yield lag, min(nodes - 1, max(1, round(fastest.inference_nodes * nodes / base)))

    def _point(self, assumed: Assumptions, nodes: int, inference_nodes: int, lag: int) -> Point:
        laid_out = lay_out(assumed.config, nodes, inference_nodes, assumed.profile)
        assert laid_out is not None, "it was compared, or is larger than one that was"
        config, plan = laid_out
        plain = scenario_of(assumed, config, plan, lag)
        every = config.save.every
        if every == "auto":
            every = self._best_save_every(plain.costs, nodes, pace(plain).step_s)
        scenario = replace(plain, faults=self.faults, save_every=every)
        done = [simulate(scenario, self.steps, seed) for seed in range(self.seeds)]
        figures = {name: [value(outcome) for outcome in done] for name, value in FIGURES.items()}
        return Point(
            nodes=nodes,
            gpus=nodes * plan.gpus_per_node,
            prompts=assumed.work.prompts,
            split=plain.split,
            max_lag=lag,
            save_every=every,
            figures={name: Spread(fmean(values), min(values), max(values)) for name, values in figures.items()},
        )

    def _best_save_every(self, costs: Costs, nodes: int, step_s: float) -> int:
        """Steps, as `save.every: auto` comes to choose them."""
        failures = 1 / self.faults.preempted_every_s + nodes / self.faults.node_fails_every_s
        between = 1 / failures if failures else PRIOR_S
        return max(1, round(best_interval_s(Cost(costs.save_blocked_s, costs.save_s), between) / step_s))


def _fastest(candidates: Sequence[Candidate], lag: int) -> Candidate:
    return min(candidates, key=lambda one: one.at(lag).step_s)
