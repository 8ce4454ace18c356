"""Input of a simulation: the work of a step, the time of each part, the split of the nodes, and the failures."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from launcher.simulate.lengths import Lognormal

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Work:
    """The batch of a step."""

    prompts: int
    group_size: int
    prompt_tokens: int
    lengths: Lognormal

    @property
    def answers(self) -> int:
        return self.prompts * self.group_size


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Time a replica needs to sample one token for each of its rows."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds) with empty caches, rows rising. Times between two points, and beyond the last, are on a line."""
    cached_token_s: float
    """Additional seconds for each token in the cache of any row, if many rows are read at the same time."""
    alone_token_s: float = 0.0
    """Additional seconds for each token in the cache of a single row."""

    def step_s(self, rows: int) -> float:
        """Seconds of a decoding step with empty caches."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        above = min(bisect_right(points, (rows, NEVER)), len(points) - 1)
        (few, low), (many, high) = points[above - 1], points[above]
        return low + (high - low) * (rows - few) / (many - few)

    def read_s(self, rows: int) -> float:
        """Additional seconds for each token in the caches of these rows, which are read at the same time."""
        return max(self.cached_token_s, self.alone_token_s / rows)

    def seconds(self, rows: int, cached: float, steps: float) -> float:
        """Seconds of `steps` decoding steps of the same rows, whose caches hold `cached` tokens in all at the start."""
        return steps * (self.step_s(rows) + self.read_s(rows) * (cached + rows * steps / 2))

    def steps(self, rows: int, cached: float, seconds: float) -> float:
        """Decoding steps, possibly fractional, that fit into `seconds`: the inverse of `seconds`."""
        first = self.step_s(rows) + self.read_s(rows) * cached
        growth = self.read_s(rows) * rows
        return 2 * seconds / (first + math.sqrt(first**2 + 2 * growth * seconds))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds that the parts of a step take on one split."""

    decode: DecodeSpeed
    rows: int
    """Largest number of answers that a replica generates at once."""
    prefill_token_s: float
    """Seconds a replica needs per prefilled token: of a prompt, once per group, and of an answer that resumes."""
    train_token_s: float
    """Seconds the training world needs per token of the batch."""
    train_square_s: float
    """Seconds the training world needs per squared length of an answer (attention)."""
    training_replicas: int
    """Data-parallel replicas. One of them trains the whole of an answer."""
    step_s: float
    """Seconds of each step that do not depend on its tokens: the update, rewards, exchange."""
    refit_s: float
    """Seconds from an update until all replicas have the weights."""
    trains_beside_refit: bool = False
    """Whether the next batch is trained, except for its update, while weights are sent. False on GPUs
    (`Platform.transfers_beside_collectives`)."""
    save_blocked_s: float = 0.0
    """Seconds training pauses for a save."""
    save_s: float = 0.0
    """Seconds from the start of a save until the checkpoint is published."""

    def train_s(self, tokens: int, squares: int, longest: int) -> float:
        """Seconds of a training step: balanced over the data-parallel replicas, or bound by its longest answer.

        Args:
            tokens: of all answers.
            squares: sum of the squares of their tokens.
            longest: tokens of the longest answer.
        """
        shared = self.train_token_s * tokens + self.train_square_s * squares
        alone = self.training_replicas * (self.train_token_s * longest + self.train_square_s * longest**2)
        return self.step_s + max(shared, alone)


@dataclass(frozen=True, slots=True)
class Split:
    """Nodes that train and nodes that generate."""

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

    def replicas_on(self, node: int) -> range:
        """Replicas on the `node`-th node that generates: all of them are lost with it."""
        per_replica = (self.inference_nodes or self.training_nodes) / self.replicas
        first = math.floor(node / per_replica + 1e-9)
        return range(first, max(first + 1, math.ceil((node + 1) / per_replica - 1e-9)))

    def __str__(self) -> str:
        return "co-located" if self.colocated else f"{self.training_nodes} + {self.inference_nodes}"


@dataclass(frozen=True, slots=True)
class Faults:
    """Mean times between failures, which happen at random moments, and what each costs; all in seconds."""

    preempted_every_s: float = NEVER
    """Running time between two preemptions."""
    grace_s: float = 120.0
    """Notice of a preemption. The run saves if a save fits, and otherwise loses its steps since the checkpoint."""
    queued_s: float = 0.0
    """Time in the queue, without nodes, after each preemption."""
    node_fails_every_s: float = NEVER
    """Time between two failures of one node."""
    restart_s: float = 300.0
    """Time from the start of an attempt until its ranks work."""
    replica_restart_s: float = 180.0
    """Time from the loss of an inference node until its replicas answer again."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a simulation depends on, except its random seed."""

    work: Work
    costs: Costs
    split: Split
    max_lag: int = 0
    """Versions that generation may run ahead of training."""
    save_every: int = 0
    """Steps; 0: only when the run is preempted."""
    faults: Faults = Faults()
