r"""Endings of an answer that add nothing to it: $ . ** \) a unit, an end of an environment, a sign of the end.

Nothing of it can be an answer: no digit is in it but that of \tag{1} and of a unit's power.
"""

from __future__ import annotations

import re

_COMMANDS = (
    r"[,;:!> ]|quad|qquad|enspace|hfill|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|smallskip|medskip|bigskip|par|newline"
    r"|\\(?:\[[^\]]*\])?|right\.?|[\])]|end\{[A-Za-z]+\*?\}|tag\*?\{[^{}]{0,9}\}|label\{[^{}]*\}|nonumber|notag"
    r"|blacksquare|square|Box|qed|QED|checkmark|%|\$|circ|degree"
)
_UNITS = (
    "percent|dollars?|cents?|euros?|pounds?|degrees?|radians?|units?|square|cubic|sq|cu|meters?|metres?|centimeters?|centimetres?|"
    "millimeters?|kilometers?|kilometres?|inch(?:es)?|feet|foot|miles?|yards?|grams?|kilograms?|seconds?|minutes?|"
    "hours?|days?|weeks?|months?|years?|lit(?:er|re)s?|people|students?|children|ways?|points?|items?|pieces?|"
    "mm|cm|dm|km|kg|mg|ml|ft|hr|min|mph|kmh|km/h|m/s|m|g|s|h|L|N|J|W|V|per"
)
_HARMLESS = re.compile(  # possessive, so that no text makes it try the same characters twice
    rf"(?:\s|[.,;:!?$*_~`'\"”’)\]}}&#-]|。|！|⬛|■|□|∎|✓|✔|✅|🎉|😊|\\(?:{_COMMANDS})"
    r"|\\(?:text|mathrm|mbox|textbf)\{\s*(?:UNITS)?[\s.]*\}"
    r"|\^\{?(?:[23]|\\circ)\}?|%|°|²|³|€|£"
    r"|\b(?:UNITS)\b|\bQ\.?E\.?D\b"
    r"|</?(?:p|b|i|div|span|strong|em|br|center|think|answer|body|html)\s*/?>|<\|[a-z_]+\|>)*+".replace("UNITS", _UNITS)
)


def is_harmless(rest: str) -> bool:
    """Whether what follows an answer adds nothing to it."""
    return _HARMLESS.fullmatch(rest) is not None
