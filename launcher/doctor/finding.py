"""Findings of `mrl doctor`, and how they write times and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    """ok: as it should be. note: worth knowing. warning: the run works, but may lose work or time. error: it will not
    run."""
    topic: str
    text: str
    """The fact, and its consequence for this run."""
    fix: str | None = None


def ok(topic: str, text: str) -> Finding:
    return Finding("ok", topic, text)


def note(topic: str, text: str, fix: str | None = None) -> Finding:
    return Finding("note", topic, text, fix)


def warning(topic: str, text: str, fix: str) -> Finding:
    return Finding("warning", topic, text, fix)


def error(topic: str, text: str, fix: str) -> Finding:
    return Finding("error", topic, text, fix)


def span(seconds: float) -> str:
    """Format a duration: `20 s`, `10 min`, `1 h 30 min`, `4 days`. Less than a second becomes `1 s`."""
    if seconds < 120:
        return f"{max(seconds, 1):.0f} s" if seconds else "0 s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} days {hours} h" if hours else f"{days} days"


def count(number: int, thing: str) -> str:
    """Format a number with its noun: `1 node`, `8 nodes`."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
