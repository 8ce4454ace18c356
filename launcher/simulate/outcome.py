"""What a simulation tells."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the surviving line: its batch is trained, and nothing takes that back."""

    number: int
    """From 1."""
    ended_at: float
    """When there were new weights; seconds since the run began."""
    ordinals: range
    """Prompts of its batch."""
    tokens: int
    """Of its answers."""
    staleness: float
    """Versions between the weights that sampled a token and those that were trained, mean over the tokens."""
    staleness_max: int
    trained_s: float
    """Seconds in which the training world trained."""
    sent_s: float
    """... in which it did not, while the weights of the step before were on their way."""
    generated_s: float
    """Seconds since the step before in which a replica computed, mean over the replicas."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of so many steps."""

    steps: tuple[Step, ...]
    seconds: float
    """From the first prompt to the last step, in the queue too."""
    held_s: float
    """Of those, with the nodes."""
    attempts: int
    repeated: int
    """Steps that were trained and lost."""
    lost_replicas: int
    """How often a replica went with its node while training went on."""
    idle_training: float
    """Share of the time held in which the training world neither trained nor sent weights. Co-located: in which a rank
    did nothing at all."""
    idle_inference: float
    """... in which a replica had nothing to compute, mean over the replicas; the same figure where co-located."""
    goodput: float
    """Share of the GPU time held that went into training and generation of steps that stayed."""

    @property
    def step_s(self) -> float:
        """Mean seconds of a step, in which nodes were held."""
        return self.held_s / len(self.steps)

    @property
    def steps_per_hour(self) -> float:
        """Over all the time, the queue included."""
        return 3600 * len(self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers that were trained, over all the time, the queue included."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def staleness(self) -> float:
        return fmean(step.staleness for step in self.steps)

    @property
    def staleness_max(self) -> int:
        return max(step.staleness_max for step in self.steps)
