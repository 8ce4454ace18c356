"""Line charts as SVG, marked as simulation: no dependency, and readable in any browser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 92, 56
COLUMNS = 105
"""Letters of the note in a line."""
COLOURS = ("#1f5fa8", "#c8501e", "#2c8a4b", "#8a3ca0", "#7a6a10", "#b02050")
TICKS = 5


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a line, and how far it spreads."""

    x: float
    mean: float
    low: float
    high: float


def line_chart(title: str, note: str, x_name: str, lines: Mapping[str, Sequence[Place]]) -> str:
    """An SVG document: a line for each name, the spread behind it, x by doublings, y from 0.

    Args:
        note: what was assumed; it stands below the title, after "simulation".
    """
    places = [place for line in lines.values() for place in line]
    xs = sorted({place.x for place in places})
    top = _round_up(max(place.high for place in places))

    def across(x: float) -> float:
        doublings = math.log2(xs[-1] / xs[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(x / xs[0]) / doublings

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 24, title, size=15, weight="bold"),
        *(
            _text(LEFT, 42 + 14 * row, text, colour="#a02020", size=11)
            for row, text in enumerate(wrap(f"simulation: {note}", COLUMNS))
        ),
    ]
    for tick in range(TICKS + 1):
        y = top * tick / TICKS
        parts.append(_path([(LEFT, down(y)), (WIDTH - RIGHT, down(y))], "#dddddd", 1))
        parts.append(_text(LEFT - 8, down(y) + 4, f"{y:,.3g}" if y < 1000 else f"{y:,.0f}", anchor="end"))
    for x in xs:
        parts.append(_text(across(x), HEIGHT - BOTTOM + 18, f"{x:,.0f}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, anchor="middle"))
    labels: list[tuple[float, float, str, str]] = []
    for (name, line), colour in zip(lines.items(), _colours(len(lines)), strict=True):
        parts += _line(sorted(line, key=lambda place: place.x), colour, across, down)
        last = max(line, key=lambda place: place.x)
        labels.append((down(last.mean), across(last.x), name, colour))
    lowest = 0.0
    for y, x, name, colour in sorted(labels):
        lowest = max(y, lowest + 14)  # below the one above it
        parts.append(_text(x + 8, lowest + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _line(
    line: Sequence[Place], colour: str, across: Callable[[float], float], down: Callable[[float], float]
) -> list[str]:
    upper = [(across(place.x), down(place.high)) for place in line]
    lower = [(across(place.x), down(place.low)) for place in reversed(line)]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
    means = [(across(place.x), down(place.mean)) for place in line]
    return [
        f'<polygon points="{corners}" fill="{colour}" fill-opacity="0.15"/>',
        _path(means, colour, 2),
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in means),
    ]


def _path(corners: Sequence[tuple[float, float]], colour: str, width: int) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", colour: str = "#222222", size: int = 12, weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"{bold}>'
        f"{escape(text)}</text>"
    )


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def _round_up(value: float) -> float:
    """The next of few round numbers."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value)
