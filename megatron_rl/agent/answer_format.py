r"""How an answer is asked for and found again: \boxed{42}, <answer>42</answer>, or a last line Answer: 42."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Found:
    """The last answer of a response."""

    text: str
    talks_on: bool
    """Whether anything but blanks and the punctuation that closes a formula follows."""


@dataclass(frozen=True, slots=True)
class Format:
    instruction: str
    """The sentence of the prompt that asks for it."""
    find: Callable[[str], Found | None]
    """The last answer of a response; None where it has none in this format, or an empty one."""
    written: Callable[[str], str]
    """A response that is an answer and no more."""


_CLOSING = re.compile(r"(?:\s|[.$]|\\\)|\\\])*")  # what may stand between an answer and the end: \boxed{42}$. or \]


def _found(answer: str, rest: str) -> Found | None:
    answer = answer.strip()
    return Found(answer, talks_on=_CLOSING.fullmatch(rest) is None) if answer else None


def _boxed(response: str) -> Found | None:
    start = response.rfind("\\boxed{")
    if start < 0:
        return None
    first = start + len("\\boxed{")
    depth = 1
    for place in range(first, len(response)):
        if response[place - 1] == "\\":
            continue  # \{ and \} are set braces, not groups
        depth += {"{": 1, "}": -1}.get(response[place], 0)
        if depth == 0:
            return _found(response[first:place], response[place + 1 :])
    return None


def _tagged(response: str) -> Found | None:
    end = response.rfind("</answer>")
    start = response.rfind("<answer>", 0, end)
    if end < 0 or start < 0:
        return None
    return _found(response[start + len("<answer>") : end], response[end + len("</answer>") :])


_LINE = re.compile(r"^[ \t]*Answer:(.*)$", re.MULTILINE)


def _line(response: str) -> Found | None:
    lines = list(_LINE.finditer(response))
    return _found(lines[-1][1], response[lines[-1].end() :]) if lines else None


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
