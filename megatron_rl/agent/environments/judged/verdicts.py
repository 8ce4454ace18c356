"""Verdicts in the reply of a judge. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from megatron_rl.agent.scoring import NotJudged

_SCORE = r"""(?<!\w){word}\b ["'*_\s]* (?:[:=]|is\b)       # in any case, in bold, or as a JSON key
    [\s"'*_$\[(<{{]* (?:\\boxed\{{\s*)?
    (?P<value>-?[0-9]+(?:\.[0-9]+)?) (?!\.?[0-9])
    (?! \s*(?:-|–|to\b)\s*[0-9])                    # 7-8 is undecided
    (?:[\s*_\])}}]* (?:/|out\ of) \s* (?P<best>[0-9]+(?:\.[0-9]+)?))?"""  # noqa: RUF001
"""Score in a reply: VERDICT: 7, and the variants that judges write: **Verdict:** 7, VERDICT: [7], Verdict: 7/10."""
_PREFERENCE = re.compile(
    r"""\bverdict\b ["'*_\s]* (?:[:=]|is\b) [\s"'*_$\[(<{]* (?:\\boxed\{\s*)? (?:answer\s+)? (?P<better>tie|[ab]) \b""",
    re.IGNORECASE | re.VERBOSE,
)


def score_in(reply: str, best: float, name: str = "VERDICT") -> float:
    """Return the last score of that name in a reply, divided by `best`: from 0 to 1. Raises NotJudged."""
    found = [*_pattern(name).finditer(reply)]
    if not found:
        raise NotJudged(f"the judge's reply has no {name}")
    said = "verdict" if name == "VERDICT" else name
    if found[-1]["best"] is not None and float(found[-1]["best"]) != best:
        raise NotJudged(f"the judge's {said} is out of {found[-1]['best']}, not out of {best:g}")
    value = float(found[-1]["value"]) / best
    if not 0 <= value <= 1:
        raise NotJudged(f"the judge's {said} is not between 0 and {best:g}")
    return value


def preference_in(reply: str) -> float:
    """Return 1 if the judge prefers the first answer, 0 for the second, and 0.5 for a tie. Raises NotJudged."""
    found = [*_PREFERENCE.finditer(reply)]
    if not found:
        raise NotJudged("the judge's reply has no VERDICT: A, B or TIE")
    return {"a": 1.0, "b": 0.0, "tie": 0.5}[found[-1]["better"].lower()]


@lru_cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_SCORE.format(word=re.escape(name)), re.IGNORECASE | re.VERBOSE)
