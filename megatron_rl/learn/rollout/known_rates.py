"""Pass rates that are known before a run begins (`curriculum.start`), and the problems that have one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_rl.agent.api import TrainingSet
from megatron_rl.agent.indexed_problems import IndexedProblems
from megatron_rl.agent.problem_digest import prompt_digest
from megatron_rl.agent.trajectories import Problem
from megatron_rl.contract.evaluation_records import PassRate
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.recipe.errors import ConfigurationError

PATIENCE_S = 30.0  # seconds to retry a file that cannot be read, for example on a stale mount

KnownRates = Mapping[tuple[str, str], float]
"""(environment, digest of the prompt) -> pass rate. Several lines of a problem count as one with all their answers."""


def read_rates(path: str) -> KnownRates:
    """Read a file of pass rates. Raises ConfigurationError."""
    lines = read_lines(PassRate, Path(path), PATIENCE_S)
    if isinstance(lines, Unreadable):
        raise ConfigurationError(f"curriculum.start: {lines}")
    if lines.damaged:
        first = lines.damaged[0]
        raise ConfigurationError(
            f"curriculum.start: {path} is not a file of `mrl evaluate --keep` or `mrl data filter`: line {first.line} "
            f"{first.why}"
        )
    found: dict[tuple[str, str], list[PassRate]] = {}
    for line in lines.records:
        found.setdefault((line.environment, line.prompt), []).append(line)
    return {key: _joint(its) for key, its in found.items()}


def _joint(lines: Sequence[PassRate]) -> float:
    answers = sum(line.answers for line in lines)
    return math.fsum(line.rate * line.answers for line in lines) / answers


def rates_of(each: TrainingSet, known: KnownRates) -> NDArray[np.float32]:
    """Return the pass rate of each problem of a set, NaN where it is not known: [problems].

    Raises ConfigurationError if none is known: then the prompts are others.
    """
    found = (known.get((each.environment, prompt_digest(problem)), np.nan) for problem in each.problems)
    rates = np.fromiter(found, np.float32, len(each.problems))
    if len(rates) and np.isnan(rates).all():
        name = f" of environment {each.environment!r}" if each.environment else ""
        raise ConfigurationError(
            f"curriculum.start has none of the {len(rates):,} training problems{name}: its prompts are others, perhaps "
            "of another data set or prompt format. Evaluate these: mrl evaluate CHECKPOINT --keep"
        )
    return rates


def with_known_rates(sets: Sequence[TrainingSet], known: KnownRates) -> list[TrainingSet]:
    """Return the sets without the problems whose pass rate is not known. Raises ConfigurationError as `rates_of`."""
    return [replace(each, problems=_known_problems(each, known)) for each in sets]


def _known_problems(each: TrainingSet, known: KnownRates) -> Sequence[Problem]:
    problems = each.problems
    unknown = {number for number, rate in enumerate(rates_of(each, known)) if math.isnan(rate)}
    if not unknown:
        return problems
    if isinstance(problems, IndexedProblems):
        listed = sorted(digest for environment, digest in known if environment == each.environment)
        return problems.without(f"not among {' '.join(listed)}", lambda: unknown)
    return [problem for number, problem in enumerate(problems) if number not in unknown]
