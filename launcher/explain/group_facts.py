"""Pure: facts about recorded groups: right answers that earn nothing, rewards that follow length, missing formats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress
from math import sqrt
from statistics import fmean, pvariance
from typing import NamedTuple

from megatron_rl.contract.rollout_records import AnswerLine, GroupLine

BINS = 40
"""Groups of answers of about the same length."""
ENDS = re.compile(r"[\s.!?,;:*`'\"$()\[\]{}]+$")
DRESS = re.compile(r"\\boxed\{(.*)\}|<answer>(.*)</answer>|(?:answer:|####)\s*(.*)")


class GroupFacts(NamedTuple):
    """Counts over recorded groups. Answers that were cut at the limit of tokens are another finding, and left out."""

    missed: int = 0
    """Answers below reward 1 to problems whose right answer is known."""
    unrewarded: int = 0
    """Number of them that end with the right answer."""
    example: str = ""
    scored: int = 0
    """Answers whose rewards are compared with their lengths."""
    by_length: float = 0.0
    """Share of the variance of their rewards that their length explains, at most 1."""
    advantages: int = 0
    correlation: float = 0.0
    """Correlation of advantage and length within the groups."""
    learned: int = 0
    ends: int = 0
    """Number of them that end what is learned."""
    rows: int = 0


NO_FACTS = GroupFacts()


def facts_of(groups: Iterable[GroupLine]) -> GroupFacts:
    missed = unrewarded = learned = ends = rows = 0
    example = ""
    scored: list[tuple[int, float]] = []
    pairs: list[tuple[float, float]] = []
    for group in groups:
        whole = [reason != "length" for reason in group.finish_reasons]
        lengths = [*compress(group.lengths, whole)]
        scored += zip(lengths, compress(group.rewards, whole), strict=True)
        if lengths and not group.passed_over:
            usual = fmean(lengths)
            pairs += zip((one - usual for one in lengths), compress(group.advantages, whole), strict=True)
        for at, answer in enumerate(group.answers):
            if all(version < 0 for sequence in answer.sequences for version in sequence.versions):
                rows += 1  # no policy sampled any of its tokens
                learned += sum(sequence.trained.count(True) for sequence in answer.sequences)
                ends += _ends(answer)
            elif group.right and whole[at] and group.rewards[at] < 1:
                missed += 1
                if ends_with(answer.text, group.right):
                    unrewarded += 1
                    example = example or answer.text[-60:]
    correlation = _correlation(pairs)
    explained = explained_by_length(scored)
    return GroupFacts(missed, unrewarded, example, len(scored), explained, len(pairs), correlation, learned, ends, rows)


def ends_with(text: str, right: str) -> bool:
    """Whether a text ends with a right answer, whatever the format of either."""
    wanted = right.strip().lower()
    if found := DRESS.fullmatch(wanted.splitlines()[-1] if wanted else ""):
        wanted = next(part for part in found.groups() if part is not None)
    wanted, said = ENDS.sub("", wanted.strip()), ENDS.sub("", text.lower().replace("**", ""))
    before = said[: -len(wanted)] if wanted and said.endswith(wanted) else None
    return before is not None and not re.search(r"[\w.,/^*+-]$", before)


def explained_by_length(answers: Sequence[tuple[int, float]]) -> float:
    """Return the share of the variance of rewards that the length explains: epsilon squared (Kelley), the correlation
    ratio corrected for the number of bins. Each answer is (length, reward)."""
    total = pvariance([reward for _, reward in answers]) * len(answers) if answers else 0.0
    bins = [*_bins(sorted(answers))]
    if not total or len(answers) <= len(bins):
        return 0.0
    within = sum(pvariance(rewards) * len(rewards) for rewards in bins)
    return 1 - within * (len(answers) - 1) / ((len(answers) - len(bins)) * total)


def _bins(answers: Sequence[tuple[int, float]]) -> Iterator[list[float]]:
    """Yield the rewards of answers of about the same length, of answers sorted by it; equal lengths are together."""
    rewards: list[float] = []
    for at, (length, reward) in enumerate(answers):
        rewards.append(reward)
        if len(rewards) * BINS >= len(answers) and answers[at + 1 : at + 2] and answers[at + 1][0] != length:
            yield rewards
            rewards = []
    yield rewards


def _correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the correlation of two columns of mean 0 within their groups (Pearson); 0 where one does not vary."""
    of_both = sum(length * advantage for length, advantage in pairs)
    size = sqrt(sum(length**2 for length, _ in pairs) * sum(advantage**2 for _, advantage in pairs))
    return of_both / size if size else 0.0


def _ends(answer: AnswerLine) -> int:
    """Number of learned tokens that are the same as the last learned one of the row."""
    found = 0
    for sequence in answer.sequences:
        tokens = [token for token, trained in zip(sequence.tokens, sequence.trained) if trained]  # noqa: B905
        found += Counter(tokens)[tokens[-1]] if tokens else 0
    return found


FORMATS = {"\\boxed": "\\boxed{", "<answer>": "<answer>", "Answer:": "answer:", "####": "####"}
"""Words of a prompt that requests a format -> those of an answer that has it, in small letters."""
CALLS = ("<tool_call>", "[tool_calls]", "<function=", "<|python_tag|>", "<|tool_call")
"""Beginnings of tool calls in chat templates, in small letters."""


class Formats(NamedTuple):
    """Counts over answers with their tokens that ended by themselves."""

    requested: int = 0
    missing: int = 0
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
    for sequence in answer.sequences:
        if sequence.turns:
            return "".join(sequence.pieces[: sequence.turns[0][0]])
    return ""
