"""Pure: overrides with several values, `grpo.group_size=8,16`, -> overrides and a name for each run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from launcher.errors import BadInput


@dataclass(frozen=True, slots=True)
class Variant:
    overrides: tuple[str, ...]
    name: str
    """Such as `group_size=8_seed=1`; empty without a sweep."""


def variants(overrides: Sequence[str]) -> list[Variant]:
    """Return every combination of values, the last key fastest; a single one if no override has several.

    A comma separates values except within quotes, brackets or braces, as in YAML: `key="a,b"` is one text and
    `key=[1,2]` one list.

    Raises:
        BadInput: two of the runs would be the same.
    """
    choices = []
    for override in overrides:
        key, equals, text = override.partition("=")
        choices.append([f"{key}{equals}{value}" for value in split(text)])
    several = [index for index, values in enumerate(choices) if len(values) > 1]
    _refuse_twins(overrides, several)
    whole = [overrides[index].partition("=")[0] for index in several]
    last = [key.rpartition(".")[2] for key in whole]
    keys = [short if last.count(short) == 1 else key for key, short in zip(whole, last, strict=True)]
    found: list[Variant] = []
    uses: Counter[str] = Counter()  # of a name: a:b and a/b both become a-b
    for combination in product(*choices):
        values = [_plain(combination[index].partition("=")[2]) for index in several]
        name = "_".join(f"{key}={value}" for key, value in zip(keys, values, strict=True))
        uses[name] += 1
        found.append(Variant(combination, name if uses[name] == 1 else f"{name}_{uses[name]}"))
    return found


def count(overrides: Sequence[str]) -> int:
    return prod(len(split(override.partition("=")[2])) for override in overrides)


def split(text: str) -> list[str]:
    """Split `1,[2,3],"a,b"` into values. Text with unbalanced brackets or quotes stays whole."""
    values, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            values.append("")
            continue
        values[-1] += character
    return [text] if quote or depth or not all(values) else values


def _refuse_twins(overrides: Sequence[str], several: Sequence[int]) -> None:
    keys = [override.partition("=")[0] for override in overrides]
    problems = []
    for index in several:
        override = overrides[index]
        values = [value.strip() for value in split(override.partition("=")[2])]
        twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        if twice:
            problems.append(f"override {override!r}: {', '.join(twice)} occurs twice, which makes the same run twice")
        if keys[index] in keys[index + 1 :]:
            problems.append(
                f"override {override!r}: {keys[index]} is given again, and the last one applies to every run"
            )
    if problems:
        raise BadInput(problems)


def _plain(value: str) -> str:
    """Write a value for the name of a directory, without characters that a shell, Slurm or pyxis interprets."""
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", value).strip("-")


def chains(job_ids: Sequence[str], running: int | None) -> list[str]:
    """Jobs that the next job of a sweep waits for, so that at most `running` run at a time.

    Job i waits for job i - running: this makes `running` chains of jobs.
    """
    return [] if running is None or len(job_ids) < running else [job_ids[len(job_ids) - running]]
