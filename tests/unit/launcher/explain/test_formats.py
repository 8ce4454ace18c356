"""Answers without the format that their prompt requests, and calls that do not parse, are counted."""

from __future__ import annotations

from launcher.explain.facts import Formats, formats_of
from megatron_rl.contract.rollout_records import AnswerLine, GroupLine, SequenceLine


def group(prompt: str, *texts: str, calls: int | None = None, reasons: tuple[str, ...] = ()) -> GroupLine:
    """A group whose answers have one turn each, after a prompt that is longer than the record's own field for it."""
    long = f"{'x' * 500} {prompt}"
    answers = [
        AnswerLine(
            text,
            [
                SequenceLine(
                    tokens=[1, 2],
                    pieces=[long, text],
                    turns=[[1, 2]],
                    trained=[False, True],
                    logprobs=[0.0, -1.0],
                    trained_logprobs=[0.0, -1.0],
                    versions=[-1, 0],
                )
            ],
            tool_calls=calls,
        )
        for text in texts
    ]
    numbers = [0.0] * len(texts)
    ends = [*reasons, *["stop"] * (len(texts) - len(reasons))]
    return GroupLine(1, 0, "p", long[:400], numbers, numbers, [2] * len(texts), ends, 0, 0, answers=answers)


def test_the_format_that_the_prompt_requests_is_looked_for():
    boxed = group("Put the answer into \\boxed{}.", "so \\boxed{3}", "it is 3", "it is 4")
    tags = group("Answer in <answer></answer>.", "<ANSWER>3</ANSWER>", "<answer>4")
    line = group("End with a line Answer: 42", "answer: 3", "3")
    assert formats_of([boxed, tags, line]) == Formats(requested=7, missing=3, format="\\boxed")


def test_a_prompt_without_a_request_and_cut_answers_count_nothing():
    assert formats_of([group("3+4=", "7", "8")]) == Formats()
    assert formats_of([group("\\boxed{}", "It is", "so \\boxed{1}", reasons=("length",))]) == Formats(requested=1)


def test_a_call_that_called_nothing_did_not_parse():
    broken = group("3+4=", "<tool_call>{broken", "it is 7", "[TOOL_CALLS] []", calls=0)
    right = group("3+4=", "<tool_call>{}</tool_call> 7", calls=1)
    without_tools = group("3+4=", "<tool_call>{broken")
    assert formats_of([broken, right, without_tools]) == Formats(offered=4, unparsed=2)


def test_groups_without_tokens_count_nothing():
    assert formats_of([group("\\boxed{}", "3")._replace(answers=[])]) == Formats()
