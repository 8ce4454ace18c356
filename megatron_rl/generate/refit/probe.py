"""A probe of an engine's weights: log-probs of a short text under the trainer's weights, which the engine must report
after it has taken a version. Pure, no torch.

It finds weights that an engine has not taken although it reports success, such as an output head that keeps its old
values, and log-probs that are not those of the model, such as those after a penalty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


class ProbeFailed(RuntimeError):
    """An engine samples by other weights than the trainer's; the message says by how much its log-probs differ."""


@dataclass(frozen=True, slots=True)
class Probe:
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-prob of each token after the first, given those before it, at temperature 1."""
    tolerance: float
    """Largest mean absolute difference of log-probs at which an engine's weights count as the trainer's."""

    def __post_init__(self) -> None:
        if len(self.tokens) < 2 or len(self.logprobs) != len(self.tokens) - 1:
            counts = f"{len(self.logprobs)} for {len(self.tokens)}"
            raise ValueError(f"a probe needs a log-prob for each token after the first, got {counts}")
        if not all(map(math.isfinite, self.logprobs)):
            raise ValueError("a probe whose log-probs are not finite")

    def difference(self, found: Sequence[float]) -> float:
        """Mean absolute difference from the log-probs that an engine reports; NaN if one of those is not a number."""
        return sum(self._differences(found)) / len(self.logprobs)

    def check(self, found: Sequence[float]) -> None:
        if (mean := self.difference(found)) <= self.tolerance:
            return
        differences = self._differences(found)
        worst = max(range(len(differences)), key=lambda at: (not differences[at] >= 0, differences[at]))
        raise ProbeFailed(
            f"log-probs of {len(found)} tokens differ from the trainer's by {mean:.3g} in the mean, where "
            f"{self.tolerance:.3g} is rounding; most for token {self.tokens[worst + 1]} at {worst + 1}: "
            f"{found[worst]:.4f} instead of {self.logprobs[worst]:.4f}"
        )

    def encode(self) -> dict[str, Any]:
        return {"tokens": [*self.tokens], "logprobs": [*self.logprobs], "tolerance": self.tolerance}

    @classmethod
    def decode(cls, content: dict[str, Any]) -> Probe:
        """Raises KeyError, TypeError or ValueError if the content is not a probe."""
        tokens, logprobs = tuple(map(int, content["tokens"])), tuple(map(float, content["logprobs"]))
        return cls(tokens, logprobs, float(content["tolerance"]))

    def _differences(self, found: Sequence[float]) -> list[float]:
        if len(found) != len(self.logprobs):
            raise ProbeFailed(f"the engine reports {len(found)} log-probs of a probe with {len(self.logprobs)}")
        return [abs(theirs - ours) for theirs, ours in zip(found, self.logprobs, strict=True)]


class EngineProbes:
    """Checks of one engine, version after version.

    An update of a small learning rate changes log-probs by less than two implementations differ, so an engine that
    keeps its old weights may pass the check of one version. But it then reports the very same numbers, which an engine
    with the new weights does not.
    """

    def __init__(self) -> None:
        self._before: tuple[Probe, tuple[float, ...]] | None = None  # of the last version that passed

    def check(self, probe: Probe, found: Sequence[float]) -> None:
        probe.check(found)
        if self._before is not None:
            before, reported = self._before
            changed = sum(now != then for now, then in zip(probe.logprobs, before.logprobs, strict=True))
            if changed > len(found) / 4 and tuple(found) == reported:
                raise ProbeFailed(
                    f"the log-probs of {len(found)} tokens are exactly those of the previous version, while "
                    f"{changed} of the trainer's have changed"
                )
        self._before = probe, tuple(found)
