"""Results of a simulation."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step that no failure took back."""

    number: int
    """Counted from 1."""
    ended_at: float
    """Time of its update, in seconds since the run began."""
    ordinals: range
    """Prompts of its batch."""
    tokens: int
    """Tokens of its answers."""
    staleness: float
    """Versions between the weights that sampled a token and those that were trained, mean over the tokens."""
    staleness_max: int
    trained_s: float
    """Seconds in which the training world trained."""
    sent_s: float
    """Seconds in which the training world waited for the weights of the step before to arrive."""
    generated_s: float
    """Seconds since the step before in which a replica computed, mean over the replicas."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    steps: tuple[SimulatedStep, ...]
    seconds: float
    """Seconds until the last step, queueing included."""
    held_s: float
    """Seconds in which the run held its nodes."""
    attempts: int
    repeated: int
    """Steps that were trained and lost."""
    lost_replicas: int
    """Replicas that were lost with their node while training continued."""
    idle_training: float
    """Share of the running time in which the training world neither trained nor sent weights. Co-located: in which
    the ranks did nothing at all."""
    idle_inference: float
    """Share of the running time in which a replica had nothing to compute, mean over the replicas. Co-located: equal
    to `idle_training`."""
    goodput: float
    """Share of the GPU time held that went into training and generation of steps that were not lost."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, without queueing."""
        return self.held_s / len(self.steps)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of trained answers per second, queueing included."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def train_s(self) -> float:
        """Mean seconds of a step in which the training world trained."""
        return fmean(step.trained_s for step in self.steps)

    @property
    def refit_s(self) -> float:
        """Mean seconds of a step in which the training world waited for weights to be sent."""
        return fmean(step.sent_s for step in self.steps)

    @property
    def generate_s(self) -> float:
        """Mean seconds of a step in which a replica computed."""
        return fmean(step.generated_s for step in self.steps)

    @property
    def staleness(self) -> float:
        return fmean(step.staleness for step in self.steps)

    @property
    def staleness_max(self) -> int:
        return max(step.staleness_max for step in self.steps)
