r"""Formats of an answer, with how to request and find it: \boxed{42}, <answer>42</answer>, or a last line Answer: 42.

The last answer of a response counts. Several boxes in one sentence are a list of answers: a response that gives two
different answers has not chosen the right one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundAnswer:
    text: str
    has_trailing_text: bool
    """Whether more than punctuation, blanks or a unit follows the answer."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    instruction: str
    find: Callable[[str], FoundAnswer | None]
    """Return the last answer of a response; None if it has no answer in this format, or an empty one."""
    written: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class _Box:
    start: int
    end: int
    text: str


_BOX = re.compile(
    r"\\+(?:boxed|fbox)(?![A-Za-z])[ \t]*(?:(?P<brace>\{)|(?P<bare>[^\s{}$\\]+|\\[a-zA-Z]+(?:\{[^{}]*\})+))"
)
_BRACE_OR_BOX = re.compile(rf"{_BOX.pattern}|\\.|[{{}}]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[.!?]\$(?=\s)|\n")
_BETWEEN = re.compile(
    r"(?:[\s,;&$]|\\[\[\]()]|\\\\|\\(?:quad|qquad|text|ldots|,|;|:| )|[{}]|\b(?:and|or)\b)*+", re.IGNORECASE
)


def _found(answer: str, rest: str) -> FoundAnswer | None:
    answer = answer.strip()
    return FoundAnswer(answer, has_trailing_text=not _HARMLESS.fullmatch(rest)) if answer else None


def _boxed(response: str) -> FoundAnswer | None:
    boxes, cut_off = _boxes(response)
    if not boxes or cut_off:
        return None
    last = len(boxes) - 1
    while last:
        between = response[boxes[last - 1].end : boxes[last].start]
        if not _BETWEEN.fullmatch(between) and _SENTENCE_END.search(between):
            break  # another sentence
        last -= 1
    answers = dict.fromkeys(text for box in boxes[last:] if (text := box.text.strip()))
    return _found(", ".join(answers), response[boxes[-1].end :])


def _boxes(response: str) -> tuple[list[_Box], bool]:
    r"""Return the outermost boxes, and whether the last one is not closed. One pass with a stack: a response of nothing
    but \boxed{ takes as long as any other."""
    boxes: list[_Box] = []
    opened: list[tuple[int, int] | None] = []  # for each open brace: starts of its box and content
    for token in _BRACE_OR_BOX.finditer(response):
        if token["brace"]:
            opened.append((token.start(), token.end()))
        elif token["bare"]:
            bare = token["bare"].rstrip(".,;:!?*")
            boxes.append(_Box(token.start(), token.start("bare") + len(bare), bare))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            start, content = box
            while boxes and boxes[-1].start > start:
                boxes.pop()
            boxes.append(_Box(start, token.end(), response[content : token.start()]))
    cut_off = any(box and (not boxes or box[0] > boxes[-1].start) for box in opened)
    return boxes, cut_off


def _tagged(response: str) -> FoundAnswer | None:
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end)
    if end < 0 or start < 0:
        return None
    return _found(response[start + len("<answer>") : end], response[end + len("</answer>") :])


_LINE = re.compile(
    r"^[ \t>#*_-]*(?:(?:so|thus|hence|therefore),?[ \t]+)?(?:the[ \t]+|my[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is)?"
    r"[ \t*_]*(?::|：)[ \t*_]*(?:\n[ \t]*)*(.*)$",
    re.MULTILINE | re.IGNORECASE,
)
_MARKS = re.compile(r"^[\s*_`]+|[\s*_`]+$")


def _line(response: str) -> FoundAnswer | None:
    lines = list(_LINE.finditer(response))
    return _found(_MARKS.sub("", lines[-1][1]), response[lines[-1].end() :]) if lines else None


# Endings that add nothing to an answer: $ . ** \) a unit, the end of an environment, a Q.E.D. sign. None of them can be
# an answer: they contain no digits except those of \tag{1} and of the power of a unit.
_COMMANDS = (
    r"[,;:!> ]|quad|qquad|enspace|hfill|hspace\*?\{[^{}]*\}|vspace\*?\{[^{}]*\}|smallskip|medskip|bigskip|par|newline"
    r"|\\(?:\[[^\]]*\])?|right\.?|[\])]|end\{[A-Za-z]+\*?\}|tag\*?\{[^{}]{0,9}\}|label\{[^{}]*\}|nonumber|notag"
    r"|blacksquare|square|Box|qed|QED|checkmark|%|\$|circ|degree"
)
_UNITS = (
    "percent|dollars?|cents?|euros?|pounds?|degrees?|radians?|units?|square|cubic|sq|cu|meters?|metres?|centimeters?|centimetres?|"
    "millimeters?|kilometers?|kilometres?|inch(?:es)?|feet|foot|miles?|yards?|grams?|kilograms?|seconds?|minutes?|"
    "hours?|days?|weeks?|months?|years?|lit(?:er|re)s?|people|students?|children|ways?|points?|items?|pieces?|"
    "mm|cm|dm|km|kg|mg|ml|ft|hr|min|mph|kph|kmh|km/h|m/s|m|g|s|h|L|N|J|W|V|per"
)
_HARMLESS = re.compile(  # possessive, so that no text makes it try the same characters twice
    rf"(?:\s|[.,;:!?$*_~`'\"”’)\]}}&#-]|。|！|⬛|■|□|∎|✓|✔|✅|🎉|😊|\\(?:{_COMMANDS})"
    r"|\\(?:SET)\{(?:[\s~.,/*-]|\\(?:[,;:! ]|cdot|times)|\^\{?-?[123]\}?|(?:UNITS)(?![A-Za-z]))*+\}"
    r"|(?:\\cdot|\\times|/)\s*(?=\\(?:SET)\{\s*(?:UNITS))|\^\{?-[123]\}?"
    r"|\^\{?(?:[23]|\\circ)\}?|%|°|²|³|€|£"
    r"|\b(?:UNITS)\b|\bQ\.?E\.?D\b"
    r"|</?(?:p|b|i|div|span|strong|em|br|center|think|answer|body|html)\s*/?>|<\|[a-z_]+\|>)*+".replace(
        "UNITS", _UNITS
    ).replace("SET", "text|mathrm|mbox|textbf|textrm|hbox|operatorname")
)


FORMATS = {
    "boxed": AnswerFormat(
        "Reason step by step and put your final answer within \\boxed{}.", _boxed, "\\boxed{{{}}}".format
    ),
    "tags": AnswerFormat(
        "Reason step by step and give your final answer as <answer>...</answer>.", _tagged, "<answer>{}</answer>".format
    ),
    "line": AnswerFormat(
        'Reason step by step and give your final answer in a last line that begins with "Answer:".',
        _line,
        "Answer: {}".format,
    ),
}
