"""Search of `mrl help WORD`: keys, metrics and commands whose name or meaning has a word."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.recipe.suggest import SYNONYMS

MOST = 6
WIDTH = 100


def distance(name: str, meaning: str, word: str, meant: str) -> int | None:
    """Return how far a name is from a word: 0 for what other programs call by this word, then by whether the last part
    of the name, the name or the meaning has it; None if nothing has it."""
    if name == meant:
        return 0
    last = name.rpartition(".")[2].rpartition("/")[2]
    for place, text in enumerate((last, name, meaning), 2):
        if re.search(rf"(?<![a-z]){re.escape(word)}", text.lower()):
            return place - (text == word)
    return None


def search_lines(word: str, kinds: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the names that fit a word, the nearest first; empty if there are none.

    kinds: heading -> name -> meaning.
    """
    word, lines = word.lower(), list[str]()
    meant = ".".join(SYNONYMS.get(word, ()))
    for heading, entries in kinds.items():
        near = {name: distance(name, meaning, word, meant) for name, meaning in entries.items()}
        ranked = sorted((name for name in near if near[name] is not None), key=lambda name: near[name] or 0)
        if not ranked:
            continue
        lines += ["", f"{heading}:"]
        width = max(map(len, ranked[:MOST]))
        for name in ranked[:MOST]:
            text = f"  {name:<{width}}  {' '.join(entries[name].split())}"
            lines.append(text if len(text) <= WIDTH else f"{text[: WIDTH - 1].rstrip()}…")
        if len(ranked) > MOST:
            lines.append(f"  and {len(ranked) - MOST} more")
    return lines[1:]
