"""Error bar of a step: the source of each part's seconds, and how far such a source is usually off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launcher.simulate.estimate import Correction, corrected
from launcher.simulate.scenario import Scenario
from launcher.simulate.splits import pace


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step."""

    name: str
    """generate, train or refit."""
    basis: str
    """Source of its seconds, as a phrase."""
    fast: float = 1.0
    """Factor on its seconds at best."""
    slow: float = 1.0
    """Factor on its seconds at worst."""


def estimated_parts(card: str) -> tuple[Part, ...]:
    """Parts of a step on a card of which only the data sheet is known.

    The factors are a judgement. Decoding takes 0.75 to 1.6 times the estimate (decode.py), whose bandwidth, time of a
    kernel and time of a sum are rules of thumb. Training reaches 0.25 to 0.48 of the peak, where 0.35 is estimated and
    Megatron-LM's README reports up to 0.48. Transfers reach 0.25 to 0.8 of the network's bandwidth, where 0.5 is
    estimated.
    """
    return (
        Part("generate", f"data sheet of {card}, memory bandwidth", 0.75, 1.6),
        Part("train", f"data sheet of {card}, FLOP/s", 0.73, 1.4),
        Part("refit", "network of 400 Gb/s per GPU", 0.63, 2.0),
    )


def measured_parts(run: str, steps: int, card: str, *, refit: bool) -> tuple[Part, ...]:
    """Parts of a step of a recipe like that of a run. Their error is that of another split or batch, which the
    simulation carries over.

    refit: whether the run sent weights between ranks, so that their transfer was measured.
    """
    basis = f"measured in {steps} step{'s' * (steps > 1)} of {run}"
    *_, estimated = estimated_parts(card)
    return Part("generate", basis), Part("train", basis), Part("refit", basis) if refit else estimated


def error_bar(scenario: Scenario, parts: Sequence[Part]) -> tuple[float, float]:
    """Seconds of a step if all parts are as fast, or as slow, as they may be."""

    def step_s(factors: dict[str, float]) -> float:
        costs = corrected(scenario.costs, Correction(**factors))
        return pace(replace(scenario, costs=costs)).step_s

    return step_s({part.name: part.fast for part in parts}), step_s({part.name: part.slow for part in parts})
