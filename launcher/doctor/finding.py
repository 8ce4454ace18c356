"""Findings of `mrl doctor`, and how they write times and sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warning", "error"]


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    level: Level
    """ok: as it should be. note: worth knowing. warning: the run works, but may lose work or time. error: it will not
    run."""
    topic: str
    text: str
    """The fact, and its consequence for this run."""
    fix: str | None = None


def ok(topic: str, text: str) -> DoctorFinding:
    return DoctorFinding("ok", topic, text)


def note(topic: str, text: str, fix: str | None = None) -> DoctorFinding:
    return DoctorFinding("note", topic, text, fix)


def warning(topic: str, text: str, fix: str) -> DoctorFinding:
    return DoctorFinding("warning", topic, text, fix)


def error(topic: str, text: str, fix: str) -> DoctorFinding:
    return DoctorFinding("error", topic, text, fix)


def span(seconds: float) -> str:
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
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"
