"""docs/troubleshooting.md quotes messages as the code writes them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from parsed import parsed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
COMMAND = re.compile(r"(error: FILE|ls|mrl|mrl-submit|pip|python|sacct|scontrol|tensorboard)\b")
CHANGES = re.compile(
    r"\.\.\.|of the last 10 steps|[\d.,%()]+|NAME|JOB|rewards\.py|TypeError|it was killed by SIGKILL|(?= reached)|\w+: "
)
"""Parts of a quoted message that differ from one run to the next, or that the code puts together."""


def strings_of_the_code() -> str:
    return "\n".join(
        node.value
        for top in ("launcher", "megatron_rl")
        for file in sorted((ROOT / top).rglob("*.py"))
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_the_quoted_messages_are_in_the_code() -> None:
    """A user searches the page for what a run printed."""
    known = strings_of_the_code()
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", PAGE.read_text(encoding="utf-8")))
    quotes = [span for span in spans if " " in span and not COMMAND.match(span)]
    assert len(quotes) > 30
    parts = {quote: [part.strip(" :,;.") for part in CHANGES.split(quote)] for quote in quotes}
    assert {quote for quote in quotes if any(len(part) > 3 and part not in known for part in parts[quote])} == set()
