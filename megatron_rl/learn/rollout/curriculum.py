"""The curriculum: problems are visited the more often, the more their recent pass rate says that they teach.

    prompt stream     passes over the problems, each in its own order
    curriculum        leaves out some problems of a pass, by chance: a problem of weight 0.3 stays in 3 of 10 passes
    assign(below)     fixes the problems of the next ordinals, by the pass rates known now
    learn(...)        takes the pass rates of the groups that a step has settled

All ranks make the same calls in the same order, so they agree on every problem. What an ordinal means never changes
once it is assigned: the assignments that are not settled are part of the state, which a checkpoint saves. A problem
without a pass rate is never left out, so the first pass is that of a run without curriculum.
"""

from __future__ import annotations

import math
import zlib
from base64 import b85decode, b85encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.trajectories import Problem
from megatron_rl.learn.rollout.known_rates import KnownRates, rates_of, read_rates
from megatron_rl.learn.rollout.stream import Mixture
from megatron_rl.learn.rollout.window import NOTHING_DRAWN, Drawn
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.rollout import CurriculumConfig

_RATE = np.dtype("<f4")
_UNITS = 172
"""A pass rate is a whole number of units of 2**-172, so that sums of rates are exact."""
_SHOWN = 60
"""Characters of a prompt in a message."""


class PassRates:
    """Recent pass rates of the problems of a set, 0..1; NaN: not known. A value that never changes.

    Newer rates take over the array of older ones, which keep the few values that differ. So a step costs what it
    settles, and reading older rates, as a checkpoint may, costs a copy of all.
    """

    def __init__(self, rates: NDArray[np.float32]) -> None:
        """rates: [problems], which the caller does not change any more."""
        self._newest = rates
        self._newer: PassRates | None = None
        self._replaced: Mapping[int, np.float32] = {}

    def __getitem__(self, index: int) -> np.float32:
        return self._newest[index] if self._newer is None else self.all()[index]

    def all(self) -> NDArray[np.float32]:
        """Return a copy: [problems]."""
        passed: list[PassRates] = []
        rates = self
        while rates._newer is not None:
            passed.append(rates)
            rates = rates._newer
        found = rates._newest.copy()
        for older in reversed(passed):
            found[[*older._replaced]] = [*older._replaced.values()]
        return found

    def updated(self, changes: Mapping[int, np.float32]) -> PassRates:
        if self._newer is not None:
            return PassRates(self.all()).updated(changes)
        rates, self._newest = self._newest, self._newest[:0]
        self._replaced = {index: rates[index] for index in changes}
        rates[[*changes]] = [*changes.values()]
        self._newer = PassRates(rates)
        return self._newer


@dataclass(frozen=True, slots=True)
class SetState:
    candidate: int  # number of problems of its stream that were visited or left out so far
    rates: PassRates


@dataclass(frozen=True, slots=True)
class Assigned:
    environment: str
    index: int


@dataclass(frozen=True, slots=True)
class CurriculumState:
    """State of the curriculum between two steps. Sets are identified by their environment."""

    sets: Mapping[str, SetState] = field(default_factory=dict)
    assigned: Mapping[int, Assigned] = field(default_factory=dict)
    """Problems of the ordinals that are assigned and not settled."""

    @classmethod
    def begun(cls, stream: Mixture, next_ordinal: int, drawn_below: int, known: KnownRates) -> CurriculumState:
        """Return the state of a run that had no curriculum up to here: it visited the problems in the stream's order.

        drawn_below: ordinal below which problems are drawn already.
        known: pass rates of `curriculum.start`.

        Raises ConfigurationError as `rates_of`.
        """
        candidates = dict.fromkeys(range(len(stream.sets)), 0)
        assigned = {}
        below = max(next_ordinal, drawn_below)
        for ordinal in range(max(0, min(next_ordinal, below - stream.cycle_length)), below):
            number, place = stream.place(ordinal)
            candidates[number] = place + 1
            if ordinal >= next_ordinal:
                assigned[ordinal] = Assigned(stream.sets[number].environment, stream.streams[number].index(place))
        rates = (PassRates(_rates_at_start(each, known)) for each in stream.sets)
        names = [each.environment for each in stream.sets]
        return cls(dict(zip(names, map(SetState, candidates.values(), rates), strict=True)), assigned)

    def to_json(self) -> dict[str, Any]:
        return {
            "sets": {
                name: {
                    "candidate": each.candidate,
                    "rates": b85encode(zlib.compress(each.rates.all().astype(_RATE).tobytes())).decode(),
                }
                for name, each in self.sets.items()
            },
            "assigned": [[ordinal, its.environment, its.index] for ordinal, its in self.assigned.items()],
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> CurriculumState:
        sets = {
            name: SetState(
                its["candidate"], PassRates(np.array(np.frombuffer(zlib.decompress(b85decode(its["rates"])), _RATE)))
            )
            for name, its in saved["sets"].items()
        }
        return cls(sets, {ordinal: Assigned(name, index) for ordinal, name, index in saved["assigned"]})


class Curriculum:
    def __init__(self, stream: Mixture, seed: int, config: CurriculumConfig, state: CurriculumState) -> None:
        self._stream, self._seed, self._config = stream, seed, config
        self._numbers = {each.environment: number for number, each in enumerate(stream.sets)}
        self._candidates = {name: state.sets[name].candidate for name in self._numbers}
        self._rates = {name: state.sets[name].rates for name in self._numbers}
        self._assigned = dict(state.assigned)
        self._left_out = 0
        known = np.concatenate([rates.all() for rates in self._rates.values()])
        known = known[~np.isnan(known)]
        self._known = len(known)
        self._sum = sum(map(_units, *(each.tolist() for each in np.unique(known, return_counts=True))))

    def problem(self, ordinal: int) -> Problem:
        its = self._assigned[ordinal]
        return self._stream.sets[self._numbers[its.environment]].problems[its.index]

    def assign(self, first: int, below: int) -> None:
        """Choose the problems of the ordinals in [first, below) that have none yet."""
        for ordinal in range(first, below):
            if ordinal not in self._assigned:
                number, _ = self._stream.place(ordinal)
                self._assigned[ordinal] = self._next(self._stream.sets[number].environment)

    def learn(self, first_ordinal: int, accuracies: Mapping[int, float]) -> None:
        """Update the pass rates by the groups that a step settles, and forget the ordinals of earlier steps.

        Args:
            first_ordinal: of the step. Its own ordinals stay known: its groups still move between ranks.
            accuracies: ordinal -> `pass_rate` of its answers, for settled groups that have answers.
        """
        changes: dict[str, dict[int, np.float32]] = {}
        for ordinal in sorted(accuracies):
            its, now = self._assigned[ordinal], accuracies[ordinal]
            changed = changes.setdefault(its.environment, {})
            before = float(changed.get(its.index, self._rates[its.environment][its.index]))
            kept = 0.0 if math.isnan(before) else self._config.memory
            rate = changed[its.index] = np.float32(now if kept == 0 else kept * before + (1 - kept) * now)
            self._known += math.isnan(before)
            self._sum += _units(float(rate)) - _units(0.0 if math.isnan(before) else before)
        self._rates |= {name: self._rates[name].updated(changed) for name, changed in changes.items()}
        for ordinal in [each for each in self._assigned if each < first_ordinal]:
            del self._assigned[ordinal]

    def state(self, next_ordinal: int) -> CurriculumState:
        return CurriculumState(
            {name: SetState(candidate, self._rates[name]) for name, candidate in self._candidates.items()},
            {ordinal: its for ordinal, its in self._assigned.items() if ordinal >= next_ordinal},
        )

    def report(self) -> dict[str, float]:
        """Return metrics of the pass rates known now and of the problems left out since the last report."""
        found: dict[str, float] = {"curriculum_left_out": self._left_out, "curriculum_known": self._known}
        self._left_out = 0
        # A quotient of integers is rounded once, so the sum is the float nearest to that of all rates (math.fsum).
        return found | ({"curriculum_pass_rate": self._sum / 2**_UNITS / self._known} if self._known else {})

    def _next(self, name: str) -> Assigned:
        """Return the next problem of a set that is not left out."""
        # `candidate` counts what the stream offers, visited or not, so an ordinal's problem depends on the pass rates
        # when it was assigned. Example: of candidates 0, 1, 2 the second one has the weight 0.1 and its draw is 0.7. It
        # is left out: ordinals 0 and 1 are candidates 0 and 2. That is why assignments are saved: a resumed run with
        # newer rates would assign others.
        while True:
            candidate = self._candidates[name]
            self._candidates[name] += 1
            index = self._stream.streams[self._numbers[name]].index(candidate)
            weight = visit_weight(float(self._rates[name][index]), self._config)
            if weight >= 1 or _uniform(self._seed, name, candidate) < weight:
                return Assigned(name, index)
            self._left_out += 1


def prompts_of(
    config: RunConfig,
    sets: Sequence[TrainingSet],
    state: CurriculumState | None = None,
    next_ordinal: int = 0,
    drawn: Drawn = NOTHING_DRAWN,
) -> Mixture | Curriculum:
    """Return the problem of each ordinal: the prompt stream of these sets, or a curriculum over it.

    Args:
        state: of the curriculum after the last step; None: it begins.
        next_ordinal, drawn: after the last step.
    """
    stream = Mixture(sets, config.training.seed, config.grpo.prompts_per_step)
    if config.curriculum is None:
        return stream
    if state is None:
        known = read_rates(config.curriculum.start) if config.curriculum.start else {}
        state = CurriculumState.begun(stream, next_ordinal, drawn.below, known)
    return Curriculum(stream, config.training.seed, config.curriculum, state)


def _rates_at_start(each: TrainingSet, known: KnownRates) -> NDArray[np.float32]:
    return rates_of(each, known) if known else np.full(len(each.problems), np.nan, np.float32)


def pass_rate(accuracies: Sequence[float], problem: Problem) -> float:
    """Return the mean accuracy of the answers to a problem, at least one. Raises ConfigurationError for an accuracy
    that is not from 0 to 1: of rewards of 1 and -1, two right answers of four have the same mean as four answers of
    0."""
    for accuracy in accuracies:
        if not 0 <= accuracy <= 1:
            of = f" of environment {problem.environment!r}" if problem.environment else ""
            raise ConfigurationError(
                f"curriculum: an answer to {problem.prompt[:_SHOWN]!r} has the accuracy {accuracy:g}, and a pass rate "
                f"is a mean of accuracies from 0 to 1. Name a component of the reward{of} from 0 to 1 as "
                "environment.accuracy, or let the whole reward be from 0 to 1"
            )
    return math.fsum(accuracies) / len(accuracies)


def visit_weight(rate: float, config: CurriculumConfig) -> float:
    """Return the probability that a pass visits a problem of this recent pass rate; 1 for an unknown rate, NaN.

    variance: least + (1 - least) * 4 p (1 - p), 1 for p = 1/2. The policy gradient of a problem with rewards of 0 and 1
    scales with their variance p (1 - p) (arXiv 2504.03380). failures: least + (1 - least) * (1 - p), Kimi k1.5's
    prioritised sampling (arXiv 2501.12599, section 2.3.4).
    """
    if math.isnan(rate):
        return 1.0
    value = 4 * rate * (1 - rate) if config.prefer == "variance" else 1 - rate
    return config.least + (1 - config.least) * value


def _units(rate: float, count: int = 1) -> int:
    """Return `count` times a pass rate of 32 bits in units of 2**-_UNITS."""
    return int(math.ldexp(rate, _UNITS)) * count


def _uniform(seed: int, environment: str, candidate: int) -> float:
    """Return a number in [0, 1) that depends on the arguments alone."""
    text = f"mrl.curriculum:{seed}:{candidate}:{environment}".encode()
    return int.from_bytes(blake2b(text, digest_size=6).digest(), "little") / 2**48
