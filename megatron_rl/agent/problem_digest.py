"""Problems in a few bytes, by which another process or another day can tell whether it has the same ones. Pure.

An environment in another process (`remote`) tells its prompts too, so it has digests like any other. The right answers
are no part of them: they may be any objects, and a problem whose answer was corrected is still the same problem. Nor is
what a prompt leads to, such as the later turns of a game.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.agent.trajectories import Problem


@dataclass(frozen=True, slots=True)
class ProblemDigest:
    """Some problems in their order: equal where there are as many, with the same prompts."""

    problems: int
    """How many there are."""
    digest: str
    """Of their prompts, the same on every machine."""

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> ProblemDigest:
        hashed = hashlib.sha256()
        for problem in problems:
            text = problem.prompt.encode("utf-8", "surrogatepass")
            hashed.update(len(text).to_bytes(8, "little") + text)
        return cls(len(problems), hashed.hexdigest()[:16])


NONE = ProblemDigest.of([])


def differences(expected: Mapping[str, ProblemDigest], found: Mapping[str, ProblemDigest]) -> list[str]:
    """In what they differ, by environment, in words; empty where they do not."""
    names = [*expected, *(name for name in found if name not in expected)]
    pairs = [(name, expected.get(name, NONE), found.get(name, NONE)) for name in names]
    return [_difference(name, one, other) for name, one, other in pairs if one != other]


def _difference(name: str, expected: ProblemDigest, found: ProblemDigest) -> str:
    if found.problems != expected.problems:
        return f"environment {name!r}: {found.problems:,} problems instead of {expected.problems:,}"
    return f"environment {name!r}: {found.problems:,} problems, but others or in another order"
