"""What a simulation is given: the work of a step, what each part of it takes, who does it, and what goes wrong."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from launcher.simulate.lengths import Lengths

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of the run is made of."""

    prompts: int
    group_size: int
    prompt_tokens: int
    lengths: Lengths

    @property
    def answers(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """What it takes a replica to sample one token for each of its rows."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), rows rising: with empty caches. Between two points, and beyond the last two, a line."""
    cached_token_s: float
    """Seconds more for each token in the cache of any row."""

    def step_s(self, rows: int) -> float:
        """Seconds of a step with empty caches."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        above = min(bisect_right(points, (rows, NEVER)), len(points) - 1)
        (few, low), (many, high) = points[above - 1], points[above]
        return low + (high - low) * (rows - few) / (many - few)

    def seconds(self, rows: int, cached: float, steps: float) -> float:
        """Of `steps` steps of the same rows, which begin with `cached` tokens in all their caches together."""
        return steps * (self.step_s(rows) + self.cached_token_s * (cached + rows * steps / 2))

    def steps(self, rows: int, cached: float, seconds: float) -> float:
        """How many of these steps, whole and part, so many seconds are enough for: the inverse of `seconds`."""
        first = self.step_s(rows) + self.cached_token_s * cached
        growth = self.cached_token_s * rows
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a step take on one split."""

    decode: DecodeSpeed
    rows: int
    """Answers that a replica has in flight at most."""
    prefill_token_s: float
    """Of a replica, for each token that it computes at once: of prompts, once a group, and of answers gone on with."""
    train_token_s: float
    """Of the training world, for each token of the batch."""
    train_square_s: float
    """... for each square of an answer's tokens: attention."""
    training_replicas: int
    """Data-parallel ones: an answer is trained by one of them."""
    step_s: float
    """Of each step, whatever its tokens: the update, rewards that are waited for, exchange."""
    refit_s: float
    """From an update until all replicas have the weights."""
    trains_beside_refit: bool = False
    """Whether the next batch may be trained meanwhile, but for its update. On GPUs it may not: see
    `Platform.transfers_beside_collectives`."""
    generates_beside_refit: bool = True
    """Whether replicas go on meanwhile. On GPUs only those of one rank do."""
    swap_s: float = 0.0
    """What a replica stands still for at the end of it."""
    save_blocked_s: float = 0.0
    """That training stands still for a save."""
    save_s: float = 0.0
    """From the begin of a save until it is published."""

    def train_s(self, tokens: int, squares: int, longest: int) -> float:
        """Seconds of a batch: as long as its longest answer takes one replica, or as the mean over them, if balanced.

        Args:
            tokens: of all answers.
            squares: sum of the squares of their tokens.
        """
        shared = self.train_token_s * tokens + self.train_square_s * squares
        alone = self.training_replicas * (self.train_token_s * longest + self.train_square_s * longest**2)
        return self.step_s + max(shared, alone)


@dataclass(frozen=True, slots=True)
class Split:
    """Who does what."""

    training_nodes: int
    inference_nodes: int
    """0: co-located, all nodes train and generate in turn."""
    replicas: int
    """Inference replicas."""

    @property
    def colocated(self) -> bool:
        return not self.inference_nodes

    @property
    def nodes(self) -> int:
        return self.training_nodes + self.inference_nodes

    @property
    def generating_nodes(self) -> int:
        return self.inference_nodes or self.training_nodes

    def replicas_on(self, node: int) -> range:
        """Which replicas the loss of a node takes along, of the `node`-th that generates."""
        per_replica = self.generating_nodes / self.replicas
        first = math.floor(node / per_replica + 1e-9)
        return range(first, max(first + 1, math.ceil((node + 1) / per_replica - 1e-9)))

    def __str__(self) -> str:
        return "co-located" if self.colocated else f"{self.training_nodes} + {self.inference_nodes}"


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, how often on average, at random moments; seconds."""

    preempted_every_s: float = NEVER
    """Of running."""
    grace_s: float = 120.0
    """That a preemption leaves: enough for 1.5 saves, and the run saves; else it is killed as it stands."""
    queued_s: float = 0.0
    """In the queue, holding nothing, after each preemption."""
    node_fails_every_s: float = NEVER
    """Of one node."""
    restart_s: float = 300.0
    """From the begin of an attempt until its ranks go on."""
    replica_restart_s: float = 180.0
    """From the loss of a node that only generates until its replicas answer again."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulation, but for its seed."""

    work: Work
    costs: Costs
    split: Split
    max_lag: int = 0
    """Versions that generation may be ahead of training; co-located 0."""
    save_every: int = 0
    """Steps; 0: only when it leaves."""
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        if self.split.colocated and self.max_lag:
            raise ValueError("of co-located ranks no lag is simulated: max_lag is 0 there")
