"""Puts the data of a run into one self-contained HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from launcher.report.compare import Comparison, overlaid, verdict
from launcher.report.run_report import RunReport
from launcher.runs.find import pasteable_command
from megatron_rl.contract.text import moment
from megatron_rl.recipe.section import flat

FOLDER = Path(__file__).with_name("page")
STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = (
    *("vendor/uPlot.iife.min.js", "dom.js", "charts.js"),
    *("text.js", "filter.js", "group.js", "rollouts.js", "start.js"),
)

HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Characters that are invisible, or change the order or the meaning of those around them: controls except line feed
and tab, directional marks, surrogates without a partner, tags."""

UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
"""Characters that may end a <script> element, or its line, or that UTF-8 does not have."""


def run_page(report: RunReport, now: float) -> str:
    return _render(
        "run.html.j2",
        {"curves": {"groups": report.groups, "evaluations": report.evaluations}, "rollouts": report.rollouts},
        report=report,
        rollouts=report.rollouts,
        command=pasteable_command("rollouts", report.status.name),
        now=now,
        recipe=flat(report.values),
    )


def comparison_page(comparison: Comparison, now: float) -> str:
    runs = [comparison.runs[place] for place in comparison.order]
    data = {"curves": {"groups": overlaid(runs), "evaluations": []}}
    return _render("several.html.j2", data, comparison=comparison, now=now, verdict=verdict(comparison))


def _render(template: str, data: Mapping[str, Any], **values: Any) -> str:
    styles = [_file(name) for name in STYLES]
    scripts = [_file(name) for name in SCRIPTS]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(_hash(text) for text in scripts)}",
            f"style-src {' '.join(_hash(text) for text in styles)}",
            "img-src data:",
            "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return (
        _templates()
        .get_template(template)
        .render(
            policy=policy,
            styles=[Markup(text) for text in styles],
            scripts=[Markup(text) for text in scripts],
            licence=Markup(_file("vendor/uPlot.LICENSE")),
            data={name: Markup(json_block(value)) for name, value in data.items()},
            **values,
        )
    )


def json_block(value: Any) -> str:
    """JSON that is safe inside a <script> element: it escapes <, >, &, line separators and lone surrogates."""
    text = json.dumps(
        value,
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
        default=lambda one: {each.name: getattr(one, each.name) for each in fields(one)},
    )
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def visible(text: str) -> str:
    return HIDDEN.sub(lambda found: f"\\u{{{ord(found[0]):x}}}", text)


@cache
def _file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8").strip()


@cache
def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}'"


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "date": _date,
        "duration": duration,
        "number": _number,
        "short": lambda value: f"{value:.2g}" if abs(value) < 100 else f"{value:,.0f}",
        "percent": lambda share: f"{share:.1%}" if 0 < share < 0.095 else f"{share:.0%}",
        "count": _count,
        "device_time": _device_time,
        "value": _value,
    }
    return environment


def _date(at: float) -> str:
    return moment(at, "%d %B %Y, %H:%M").lstrip("0")


def duration(seconds: float) -> str:
    """Format seconds: `33 ms`, `48 s`, `12 min`, `3.4 h`, `2.1 days`."""
    for unit, size, digits in (("days", 86400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:.{digits}f} {unit}"
    if 0 < seconds < 1:
        return f"{seconds * 1000:.{0 if seconds > 0.01 else 1}f} ms"
    return f"{seconds:.{1 if 0 < seconds < 10 else 0}f} s"


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _count(value: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit != "k" and value >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}"


def _device_time(seconds: float, device: str) -> str:
    unit, size = ("hours", 3600) if seconds >= 3600 else ("minutes", 60)
    return f"{seconds / size:,.1f} {device}-{unit}"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value if value else '""'
    return json.dumps(value, ensure_ascii=False)
