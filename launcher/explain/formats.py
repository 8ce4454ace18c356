"""Format failures of recorded answers: answers that the prompt's own words cannot find, and calls that do not parse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatron_rl.contract.rollout_records import AnswerLine, GroupLine

FORMATS = {"\\boxed": "\\boxed{", "<answer>": "<answer>", "Answer:": "answer:", "####": "####"}
"""Words of a prompt that requests a format -> those of an answer that has it, in small letters."""
CALLS = ("<tool_call>", "[tool_calls]", "<function=", "<|python_tag|>", "<|tool_call")
"""Beginnings of tool calls in chat templates, in small letters."""


class Formats(NamedTuple):
    """Counts over answers that ended by themselves; those cut at the limit of tokens are another finding."""

    requested: int = 0
    """Answers whose prompt requests a format."""
    missing: int = 0
    """Answers among them without it."""
    format: str = ""
    """The format that is missing most often, as the prompt names it."""
    offered: int = 0
    """Answers that tools were offered to."""
    unparsed: int = 0
    """Answers among them that begin a call, and called nothing."""


NO_FORMATS = Formats()


def formats_of(groups: Iterable[GroupLine]) -> Formats:
    """Count over the answers that are recorded with their tokens."""
    requested = missing = offered = unparsed = 0
    lacking = dict.fromkeys(FORMATS, 0)
    for group in groups:
        for answer, reason in zip(group.answers, group.finish_reasons):  # noqa: B905 - a torn record may have fewer
            if reason == "length":
                continue
            text = answer.text.lower()
            prompt = _prompt(answer) or group.prompt
            wanted = [name for name in FORMATS if name in prompt]
            requested += bool(wanted)
            if wanted and not any(FORMATS[name] in text for name in wanted):
                missing += 1
                lacking[wanted[0]] += 1
            if answer.tool_calls is not None:
                offered += 1
                unparsed += not answer.tool_calls and any(call in text for call in CALLS)
    return Formats(requested, missing, max(lacking, key=lacking.__getitem__) if missing else "", offered, unparsed)


def _prompt(answer: AnswerLine) -> str:
    """Return the tokens before the model's first turn as text."""
    for sequence in answer.sequences:
        if sequence.turns:
            return "".join(sequence.pieces[: sequence.turns[0][0]])
    return ""
