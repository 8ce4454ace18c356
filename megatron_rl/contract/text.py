"""Texts of a task, a model, a command or an exception, which may hold anything: as a terminal can show them, and as
numbers."""

from __future__ import annotations

import re
import time

_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")


def printable(text: str) -> str:
    """Return a text in one line: control characters, line breaks and marks that reorder text are escaped. A terminal
    would obey them."""
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def printable_lines(text: str) -> str:
    """Return a text of several lines, with tabs, and with all else escaped."""
    return "".join(each if each in "\n\t" else printable(each) for each in text)


def with_colours(text: str) -> str:
    """Do as `printable_lines`, and keep what sets a colour: a log may have some, and a terminal resets them."""
    return "".join(part if _COLOUR.fullmatch(part) else printable_lines(part) for part in _COLOUR.split(text))


def whole_number(text: str | None) -> int | None:
    """Return the number that a text of at most 18 ASCII digits is; None for any other text. `str.isdigit` also accepts
    characters that int() refuses, and int() raises ValueError for thousands of digits."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def moment(at: float, form: str) -> str:
    """Return a Unix time in this process's time zone, in a form of time.strftime."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):  # of a damaged record
        return "an unknown time"


def size(byte_count: float) -> str:
    """Format bytes: `415 GiB`, `7.63 GiB`, `312 KiB`."""
    value, units = float(byte_count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    unit = units[0]
    return f"{value:.3g} {unit}" if value < 100 else f"{value:.0f} {unit}"
