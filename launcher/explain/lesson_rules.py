"""Conditions of the rules about the lesson: what prompts say, what answers earn, and what is learned of rows.

They look at recorded answers and at lesson.json. The table of the rules is in `rules`.
"""

from __future__ import annotations

from launcher.explain.record import Record
from megatron_rl.contract.text import printable

LEAST_ANSWERS = 32
"""Fewest recorded answers that say something about a format."""
FORMAT_MISSING = 0.3
"""Share of complete answers without the requested format, in the newest steps, that is too much: most models learn a
format in their first tens of steps."""
CALLS_UNPARSED = 0.1
"""Share of answers with calls that do not parse, and no other call, that is too much."""
EQUAL = 0.5
"""Share of prompts that repeat another one. Data that is sampled with weights, or in which each problem stands several
times, has fewer."""
LEAST_PROMPTS = 8
"""Fewest prompts that say something about a set of them."""
EMPTY = 0.02
"""Share of prompts that say nothing beyond what all prompts share."""
LONG_PROMPT, MANY_LENGTHS = 200, 20
"""Characters of the longest prompt, and different lengths, from which on prompts of equal length are a coincidence."""
CUT, FEWEST_CUT, PILE = 0.02, 5, 5
"""Share and number of different prompts as long as the longest one, and how many times more they are than those of any
other length, where the data was cut."""
LOST_TO_FORMAT = 0.1
"""Share of the answers below reward 1 that end with the right answer. By chance a wrong one does so now and then."""
LENGTH_ANSWERS = 128
"""Fewest answers that are compared with their lengths."""
BY_LENGTH = 0.85
"""Share of the variance of rewards that their length explains, where they depend on hardly anything else: a reward that
counts characters is not an exact function of the number of tokens."""
WITH_LENGTH = 0.5
"""Correlation of advantage and length, positive or negative, that pushes the length. Runs of the demo
have less than 0.1."""
MOSTLY_ENDS = 0.5
"""Share of the learned tokens that only end something: a label of one token and its end make exactly half."""
LEAST_ROWS = 4
"""Fewest recorded rows of data that say something about the others."""


def prompts_equal(record: Record) -> str | None:
    counts = record.lesson.prompts if record.lesson else None
    if counts is None or counts.prompts < LEAST_PROMPTS or counts.distinct > EQUAL * counts.prompts:
        return None
    return f"The first {counts.prompts:,} prompts have {counts.distinct:,} different texts: most repeat another one"


def prompts_empty(record: Record) -> str | None:
    counts = record.lesson.prompts if record.lesson else None
    if counts is None or counts.empty < max(2, EMPTY * counts.prompts):
        return None
    return f"{counts.empty:,} of the first {counts.prompts:,} prompts say nothing beyond what all prompts share"


def prompts_cut(record: Record) -> str | None:
    counts = record.lesson.prompts if record.lesson else None
    if counts is None or counts.longest < LONG_PROMPT or counts.lengths < MANY_LENGTHS:
        return None
    if counts.at_longest < max(FEWEST_CUT, CUT * counts.distinct) or counts.at_longest <= PILE * counts.at_another:
        return None
    return (
        f"{counts.at_longest:,} of {counts.distinct:,} different prompts have exactly {counts.longest:,} characters, "
        f"the largest number, and at most {counts.at_another:,} any other: they were probably cut there"
    )


def right_answer_below_1(record: Record) -> str | None:
    right = record.lesson.right if record.lesson else []
    low = [one for one in right if one.reward is not None and one.reward < 1]
    lost = [one for one in right if one.reward is None]
    if low:
        first = low[0]
        return (
            f"The right answer of the data earns less than 1 for {len(low)} of the first {len(right)} problems: "
            f"{_quoted(first.answer)} to {_quoted(first.prompt)} earned {first.reward:.3g} before the first step"
        )
    if not lost or 2 * len(lost) < len(right):
        return None
    return (
        f"The right answer of the data could not be scored for {len(lost)} of the first {len(right)} problems: "
        f"{printable(lost[0].why)}"
    )


def right_answers_unrewarded(record: Record) -> str | None:
    facts = record.facts
    if facts.missed < LEAST_ANSWERS or facts.unrewarded < LOST_TO_FORMAT * facts.missed:
        return None
    return (
        f"{facts.unrewarded} of {facts.missed} recorded answers of the newest steps that earned less than 1, cut ones "
        f"left out, end with the right answer of the data, such as {_quoted(facts.example)}"
    )


def reward_by_length(record: Record) -> str | None:
    facts = record.facts
    if facts.scored < LENGTH_ANSWERS or facts.by_length < BY_LENGTH:
        return None
    return (
        f"The length of an answer explains {min(1.0, facts.by_length):.0%} of the variance of the rewards of "
        f"{facts.scored:,} answers of the newest steps, cut ones left out: the reward depends on hardly anything else"
    )


def advantage_by_length(record: Record) -> str | None:
    facts = record.facts
    if facts.advantages < LENGTH_ANSWERS or abs(facts.correlation) < WITH_LENGTH or reward_by_length(record):
        return None
    which = "longer" if facts.correlation > 0 else "shorter"
    return (
        f"Advantage and length of {facts.advantages:,} answers of the newest steps, cut ones left out, have a "
        f"correlation of {facts.correlation:.2f} within their groups: the policy is taught {which} answers"
    )


def learned_ends(record: Record) -> str | None:
    facts = record.facts
    if facts.rows < LEAST_ROWS or facts.ends <= MOSTLY_ENDS * facts.learned:
        return None
    return (
        f"{facts.ends} of the {facts.learned} learned tokens of {facts.rows} recorded rows only end something: the "
        "rows teach hardly more than to stop"
    )


def _quoted(text: str) -> str:
    """Return the beginning of a text of the data, without characters that control a terminal."""
    return f'"{printable(text[:60])}"'


def format_missing(record: Record) -> str | None:
    seen = record.formats
    if seen.requested < LEAST_ANSWERS or seen.missing < FORMAT_MISSING * seen.requested:
        return None
    return (
        f"{seen.missing} of {seen.requested} recorded answers of the newest steps, cut ones left out, do not have the "
        f"format that their prompt requests ({seen.format}), so that no reward can find an answer in them"
    )


def calls_do_not_parse(record: Record) -> str | None:
    seen = record.formats
    if seen.offered < LEAST_ANSWERS or seen.unparsed < CALLS_UNPARSED * seen.offered:
        return None
    return (
        f"{seen.unparsed} of {seen.offered} recorded answers of the newest steps begin a tool call that cannot be "
        "parsed, or name a tool that is not offered, and called nothing"
    )
