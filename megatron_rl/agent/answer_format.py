r"""How an answer is asked for and found again: \boxed{42}, <answer>42</answer>, or a last line Answer: 42.

The last answer of a response counts. Several boxes in the last sentence that has one are a list of answers: a response
that names two different ones has not chosen the right one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.agent.answer_end import is_harmless


@dataclass(frozen=True, slots=True)
class Found:
    """The last answer of a response."""

    text: str
    talks_on: bool
    """Whether more follows than marks, blanks and a unit, see answer_end.py."""


@dataclass(frozen=True, slots=True)
class Format:
    instruction: str
    """The sentence of the prompt that asks for it."""
    find: Callable[[str], Found | None]
    """The last answer of a response; None where it has none in this format, or an empty one."""
    written: Callable[[str], str]
    """A response that is an answer and no more."""


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


def _found(answer: str, rest: str) -> Found | None:
    answer = answer.strip()
    return Found(answer, talks_on=not is_harmless(rest)) if answer else None


def _boxed(response: str) -> Found | None:
    boxes, cut_off = _boxes(response)
    if not boxes or cut_off:
        return None
    last = len(boxes) - 1
    while last and _in_one_sentence(response[boxes[last - 1].end : boxes[last].start]):
        last -= 1
    answers = dict.fromkeys(text for box in boxes[last:] if (text := box.text.strip()))
    return _found(", ".join(answers), response[boxes[-1].end :])


def _boxes(response: str) -> tuple[list[_Box], bool]:
    r"""The boxes that are in no other, and whether the last one is not closed.

    One pass with a stack, so that a response of nothing but \boxed{ takes no longer than another.
    """
    boxes: list[_Box] = []
    opened: list[tuple[int, int] | None] = []  # for each open brace: where its box and its content begin
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


def _in_one_sentence(between: str) -> bool:
    return _BETWEEN.fullmatch(between) is not None or _SENTENCE_END.search(between) is None


def _tagged(response: str) -> Found | None:
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


def _line(response: str) -> Found | None:
    lines = list(_LINE.finditer(response))
    return _found(_MARKS.sub("", lines[-1][1]), response[lines[-1].end() :]) if lines else None


FORMATS = {
    "boxed": Format("Reason step by step and put your final answer within \\boxed{}.", _boxed, "\\boxed{{{}}}".format),
    "tags": Format(
        "Reason step by step and give your final answer as <answer>...</answer>.", _tagged, "<answer>{}</answer>".format
    ),
    "line": Format(
        'Reason step by step and give your final answer in a last line that begins with "Answer:".',
        _line,
        "Answer: {}".format,
    ),
}
