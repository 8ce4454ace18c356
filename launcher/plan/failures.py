"""Expected time of a run with preemptions and failing nodes, in closed form.

Failures come at random moments, at constant rates. One that takes a training node, or leaves no time to save, sends
the run back to its newest checkpoint: with failures at rate r, `every` steps of s seconds that end with a checkpoint
take (exp(r every s) - 1) / r seconds on average (Young 1974; Daly 2006, equation 6), plus a restart for each failure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.errors import BadInput
from launcher.plan.costs import Scenario
from launcher.plan.pace import Pace
from megatron_rl.contract.checkpoint_interval import PRIOR_S, SaveCost, best_interval_s

NEVER = math.inf
SAVES_IN_GRACE = 1.5
"""Saves that must fit into the notice of a preemption, as at a real drain."""
HOPELESS = 20.0
"""Failures between two checkpoints: one in exp(20) attempts, 500 million, would see none."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Mean times between failures, which happen at random moments, and what each costs; all in seconds."""

    preempted_every_s: float = NEVER
    grace_s: float = 120.0
    """Notice of a preemption. The run saves if a save fits, and otherwise loses its steps since the checkpoint."""
    queued_s: float = 0.0
    node_fails_every_s: float = NEVER
    restart_s: float = 300.0
    """Time from the start of an attempt until its ranks work."""
    replica_restart_s: float = 180.0
    """Time from the loss of an inference node until its replicas answer again."""

    @property
    def expected(self) -> bool:
        return min(self.preempted_every_s, self.node_fails_every_s) < NEVER


@dataclass(frozen=True, slots=True)
class ExpectedRun:
    """A run of `steps` steps with failures; all figures are means."""

    steps: int
    save_every: int
    step_s: float
    """Seconds of a step in which the run holds its nodes, restarts and repeated steps included."""
    seconds: float
    tokens_per_s: float
    attempts: float
    repeated: float
    """Steps that are trained and lost."""
    lost_replicas: float
    """Replicas that are lost with their node while training continues."""
    goodput: float
    """Share of the GPU time held that goes into training and generation of steps that are not lost."""


def expect(scenario: Scenario, pace: Pace, faults: Faults, steps: int, save_every: int | None = None) -> ExpectedRun:
    """Return what a run of so many steps takes.

    Args:
        pace: its steady state.
        save_every: steps; None: the interval that `save.every: auto` would choose.

    Raises:
        BadInput: failures come so often that the run does not advance.
    """
    split, costs, node_rate = scenario.split, scenario.costs, 1 / faults.node_fails_every_s
    preemptions = 1 / faults.preempted_every_s
    saved = SAVES_IN_GRACE * costs.save_s <= faults.grace_s
    rollbacks = split.training_nodes * node_rate + preemptions * (not saved)
    drains = preemptions * saved
    every = save_every or _best_save_every(scenario, pace.step_s, faults)

    # Running seconds of a step: the loop stops for a save, a lost inference node takes its share of the replicas until
    # they are back, and a drain ends a training step before its update.
    step_s = pace.step_s + costs.save_blocked_s / every
    step_s *= 1 + node_rate * faults.replica_restart_s * pace.generate_s / pace.step_s * (not split.colocated)
    step_s *= 1 + drains * pace.train_s**2 / (2 * pace.step_s)
    # After a rollback, no batch is ahead; and a checkpoint only counts when it is published.
    refill_s = pace.alone_s - pace.step_s
    published_s = min(costs.save_s, every * step_s)
    if rollbacks * every * step_s > HOPELESS:
        raise BadInput(
            f"a failure every {1 / rollbacks:,.3g} s, and {every * step_s:,.3g} s from one checkpoint to the next: the "
            "run would not advance; give longer times to --preempt-every and --node-fails-every"
        )
    between_s = _repeated_s(every * step_s, rollbacks) * (1 + rollbacks * (refill_s + published_s))

    restart_s = faults.restart_s + costs.refit_s
    held_s = between_s * (1 + rollbacks * restart_s + drains * (costs.save_s + restart_s)) / every
    seconds = held_s + between_s * preemptions * faults.queued_s / every
    running_s = between_s / every  # of a step
    inference_nodes = split.inference_nodes
    return ExpectedRun(
        steps=steps,
        save_every=every,
        step_s=held_s,
        seconds=steps * seconds,
        tokens_per_s=pace.tokens / seconds,
        attempts=1 + steps * running_s * (rollbacks + drains),
        repeated=max(0.0, steps * (running_s * (1 - rollbacks * refill_s) / step_s - 1)),
        lost_replicas=steps * running_s * node_rate * max(inference_nodes, split.replicas) * (inference_nodes > 0),
        goodput=pace.busy * pace.step_s / held_s,
    )


def _repeated_s(seconds: float, rate: float) -> float:
    """Mean seconds until so many pass without a failure, and each failure begins them again."""
    return math.expm1(rate * seconds) / rate if rate else seconds


def _best_save_every(scenario: Scenario, step_s: float, faults: Faults) -> int:
    failures_per_s = 1 / faults.preempted_every_s + scenario.split.nodes / faults.node_fails_every_s
    between_s = 1 / failures_per_s if failures_per_s else PRIOR_S
    cost = SaveCost(scenario.costs.save_blocked_s, scenario.costs.save_s)
    return max(1, round(best_interval_s(cost, between_s) / step_s))
