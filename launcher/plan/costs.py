"""Input of the formulas of a step: its work, the time of each part, and the split of the nodes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from launcher.plan.lengths import Lognormal


@dataclass(frozen=True, slots=True)
class Work:
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

    def step_s(self, rows: float) -> float:
        """Seconds of a decoding step with empty caches."""
        points = self.points
        if len(points) == 1 or rows <= points[0][0]:
            return points[0][1]
        above = min(bisect_right(points, (rows, math.inf)), len(points) - 1)
        (few, low), (many, high) = points[above - 1], points[above]
        return low + (high - low) * (rows - few) / (many - few)

    def read_s(self, rows: float) -> float:
        return max(self.cached_token_s, self.alone_token_s / rows)


@dataclass(frozen=True, slots=True)
class Costs:
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
    trains_beside_refit: bool = False
    """Whether the next batch is trained, except for its update, while weights are sent. False on GPUs
    (`Device.transfers_beside_collectives`)."""
    save_blocked_s: float = 0.0
    save_s: float = 0.0
    """Seconds from the start of a save until the checkpoint is published."""

    def train_s(self, tokens: float, squares: float, longest: float) -> float:
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
    training_nodes: int
    inference_nodes: int
    replicas: int

    @property
    def colocated(self) -> bool:
        return not self.inference_nodes

    @property
    def nodes(self) -> int:
        return self.training_nodes + self.inference_nodes

    def __str__(self) -> str:
        return "co-located" if self.colocated else f"{self.training_nodes} + {self.inference_nodes}"


@dataclass(frozen=True, slots=True)
class Scenario:
    work: Work
    costs: Costs
    split: Split
    max_lag: int = 0
    """Versions that generation may run ahead of training."""
