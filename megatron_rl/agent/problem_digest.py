"""Digests of problems, with which another process or a later start checks that it has the same problems. Pure.

A digest covers the prompts only, which a `remote` environment sends too. The right answers are excluded: they may be
arbitrary objects, and a problem whose answer was corrected is still the same problem. Later turns of a conversation are
excluded as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_rl.agent.trajectories import Problem


@dataclass(frozen=True, slots=True)
class ProblemDigest:
    """Count and digest of a list of problems; equal if the lists have the same prompts in the same order."""

    problems: int
    digest: str

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> ProblemDigest:
        hashed, count = hashlib.sha256(), 0
        for count, problem in enumerate(problems, 1):  # noqa: B007 - used after the loop
            text = problem.prompt.encode("utf-8", "surrogatepass")
            hashed.update(len(text).to_bytes(8, "little") + text)
        return cls(count, hashed.hexdigest()[:16])


def name_of(problem: Problem) -> str:
    """Return the name of a problem in the record of rollouts: a digest of its environment and prompt."""
    return hashlib.sha256(f"{problem.environment}\n{problem.prompt}".encode("utf-8", "replace")).hexdigest()[:12]


def prompt_digest(problem: Problem) -> str:
    """Return what stands for a problem in files of pass rates. Equal prompts have the same."""
    return hashlib.sha256(problem.prompt.encode("utf-8", "surrogatepass")).hexdigest()[:16]


NONE = ProblemDigest.of([])


def differences(expected: Mapping[str, ProblemDigest], found: Mapping[str, ProblemDigest]) -> list[str]:
    """Describe the differences, one sentence per environment; empty if there are none."""
    names = [*expected, *(name for name in found if name not in expected)]
    pairs = [(name, expected.get(name, NONE), found.get(name, NONE)) for name in names]
    return [_difference(name, one, other) for name, one, other in pairs if one != other]


def _difference(name: str, expected: ProblemDigest, found: ProblemDigest) -> str:
    if found.problems != expected.problems:
        return f"environment {name!r}: {found.problems:,} problems instead of {expected.problems:,}"
    return f"environment {name!r}: {found.problems:,} problems, but different ones or in another order"
