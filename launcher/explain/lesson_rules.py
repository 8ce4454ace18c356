"""Rules about the lesson: what prompts say, what answers earn, and what is learned of rows.

They look at recorded answers and at lesson.json.
"""

from __future__ import annotations

from launcher.explain.record import Record
from megatron_rl.contract.learning import Rule, Seen
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
EMPTY = 0.02
LONG_PROMPT, MANY_LENGTHS = 200, 20
"""Characters of the longest prompt, and different lengths, from which on prompts of equal length are a coincidence."""
CUT, FEWEST_CUT, PILE = 0.02, 5, 5
"""Share and number of different prompts as long as the longest one, and how many times more they are than those of any
other length, where the data was cut."""
LOST_TO_FORMAT = 0.1
"""Share of the answers below reward 1 that end with the right answer. By chance a wrong one does so now and then."""
LENGTH_ANSWERS = 128
BY_LENGTH = 0.85
"""Share of the variance of rewards that their length explains, where they depend on hardly anything else: a reward that
counts characters is not an exact function of the number of tokens."""
WITH_LENGTH = 0.5
"""Correlation of advantage and length, positive or negative, that pushes the length. Runs of the demo
have less than 0.1."""
MOSTLY_ENDS = 0.5
"""Share of the learned tokens that only end something: a label of one token and its end make exactly half."""
LEAST_ROWS = 4


def prompts_equal(record: Record) -> Seen | None:
    counts = record.prompts
    if counts.prompts < LEAST_PROMPTS or counts.distinct > EQUAL * counts.prompts:
        return None
    return Seen(
        f"The first {counts.prompts:,} prompts have {counts.distinct:,} different texts: most repeat another one"
    )


def prompts_empty(record: Record) -> Seen | None:
    counts = record.prompts
    if counts.empty < max(2, EMPTY * counts.prompts):
        return None
    return Seen(f"{counts.empty:,} of the first {counts.prompts:,} prompts say nothing beyond what all prompts share")


def prompts_cut(record: Record) -> Seen | None:
    counts = record.prompts
    if counts.longest < LONG_PROMPT or counts.lengths < MANY_LENGTHS:
        return None
    if counts.at_longest < max(FEWEST_CUT, CUT * counts.distinct) or counts.at_longest <= PILE * counts.at_another:
        return None
    return Seen(
        f"{counts.at_longest:,} of {counts.distinct:,} different prompts have exactly {counts.longest:,} characters, "
        f"the largest number, and at most {counts.at_another:,} any other: they were probably cut there"
    )


def right_answer_below_1(record: Record) -> Seen | None:
    right = record.lesson.right if record.lesson else []
    low = [one for one in right if one.reward is not None and one.reward < 1]
    lost = [one for one in right if one.reward is None]
    if low:
        first = low[0]
        return Seen(
            f"The right answer of the data earns less than 1 for {len(low)} of the first {len(right)} problems: "
            f"{_quoted(first.answer)} to {_quoted(first.prompt)} earned {first.reward:.3g} before the first step"
        )
    if not lost or 2 * len(lost) < len(right):
        return None
    return Seen(
        f"The right answer of the data could not be scored for {len(lost)} of the first {len(right)} problems: "
        f"{printable(lost[0].why)}"
    )


def right_answers_unrewarded(record: Record) -> Seen | None:
    facts = record.facts
    if facts.missed < LEAST_ANSWERS or facts.unrewarded < LOST_TO_FORMAT * facts.missed:
        return None
    return Seen(
        f"{facts.unrewarded} of {facts.missed} recorded answers of the newest steps that earned less than 1, cut ones "
        f"left out, end with the right answer of the data, such as {_quoted(facts.example)}"
    )


def reward_by_length(record: Record) -> Seen | None:
    facts = record.facts
    if facts.scored < LENGTH_ANSWERS or facts.by_length < BY_LENGTH:
        return None
    return Seen(
        f"The length of an answer explains {min(1.0, facts.by_length):.0%} of the variance of the rewards of "
        f"{facts.scored:,} answers of the newest steps, cut ones left out: the reward depends on hardly anything else"
    )


def advantage_by_length(record: Record) -> Seen | None:
    facts = record.facts
    if facts.advantages < LENGTH_ANSWERS or abs(facts.correlation) < WITH_LENGTH or reward_by_length(record):
        return None
    which = "longer" if facts.correlation > 0 else "shorter"
    return Seen(
        f"Advantage and length of {facts.advantages:,} answers of the newest steps, cut ones left out, have a "
        f"correlation of {facts.correlation:.2f} within their groups: the policy is taught {which} answers"
    )


def learned_ends(record: Record) -> Seen | None:
    facts = record.facts
    if facts.rows < LEAST_ROWS or facts.ends <= MOSTLY_ENDS * facts.learned:
        return None
    return Seen(
        f"{facts.ends} of the {facts.learned} learned tokens of {facts.rows} recorded rows only end something: the "
        "rows teach hardly more than to stop"
    )


def format_missing(record: Record) -> Seen | None:
    seen = record.formats
    if seen.requested < LEAST_ANSWERS or seen.missing < FORMAT_MISSING * seen.requested:
        return None
    return Seen(
        f"{seen.missing} of {seen.requested} recorded answers of the newest steps, cut ones left out, do not have the "
        f"format that their prompt requests ({seen.format}), so that no reward can find an answer in them"
    )


def calls_do_not_parse(record: Record) -> Seen | None:
    seen = record.formats
    if seen.offered < LEAST_ANSWERS or seen.unparsed < CALLS_UNPARSED * seen.offered:
        return None
    return Seen(
        f"{seen.unparsed} of {seen.offered} recorded answers of the newest steps begin a tool call that cannot be "
        "parsed, or name a tool that is not offered, and called nothing"
    )


def _quoted(text: str) -> str:
    """Return the beginning of a text of the data, without characters that control a terminal."""
    return f'"{printable(text[:60])}"'


RULES: dict[str, Rule[Record]] = {
    "format-missing": Rule(
        "right_ratio",
        f"{FORMAT_MISSING:.0%} of the answers or more, cut ones left out, lack the format that the prompt requests",
        format_missing,
        "Read some (mrl rollouts RUN --reward 0). Say the format in the prompt with an example, reward it alone with a "
        "small value (format_reward of the mathematics environments, or your own component), or teach it first with "
        "worked examples (training.objective: supervised). A chat template that ends the answer too early looks alike.",
    ),
    "calls-do-not-parse": Rule(
        "tool_calls_mean",
        f"{CALLS_UNPARSED:.0%} of the answers or more begin a tool call, and called nothing",
        calls_do_not_parse,
        "Read some (mrl rollouts RUN). The model may call tools in another format than its chat template has: choose "
        "the model's own template, or teach calls first with worked examples (training.objective: supervised).",
    ),
    "prompts-equal": Rule(
        "",
        f"{1 - EQUAL:.0%} of the first prompts or more repeat another one",
        prompts_equal,
        "Look at the prompts (mrl rows RECIPE): the column of the question may be another (environment.args, data), or "
        "the chat template may leave the message out.",
    ),
    "prompts-empty": Rule(
        "",
        f"{EMPTY:.0%} of the first prompts or more say nothing beyond what all of them share",
        prompts_empty,
        "Look at the rows (mrl rows RECIPE --all), and remove those without a question from the data.",
    ),
    "prompts-cut": Rule(
        "",
        "far more prompts have the largest number of characters than any other number",
        prompts_cut,
        "Look at the longest prompts: data that was cut at a number of characters lost the end of its questions. Take "
        "the data from before the cut; prompts that do not fit training.sequence_length are left out whole.",
    ),
    "right-answer-below-1": Rule(
        "right_ratio",
        "the reward gave the right answer of the data less than 1 at the start, or could not score it",
        right_answer_below_1,
        "Compare the column of the right answer with what the reward function expects (mrl environments try NAME): an "
        "answer that the data calls right should earn 1, the reward of a right answer in all metrics.",
    ),
    "right-answers-unrewarded": Rule(
        "right_ratio",
        f"{LOST_TO_FORMAT:.0%} of the answers below 1 or more end with the right answer of the data",
        right_answers_unrewarded,
        "Read some (mrl rollouts RUN --reward 0). Say the format in the prompt with an example, accept more of them in "
        "the reward function, or teach the format first (training.objective: supervised).",
    ),
    "reward-by-length": Rule(
        "answer_length",
        f"the length of answers explains {BY_LENGTH:.0%} of the variance of their rewards",
        reward_by_length,
        "Look at the reward function, and at a penalty for long answers (grpo.overlong): as it is, the policy learns a "
        "length, whatever the answers say.",
    ),
    "advantage-by-length": Rule(
        "answer_length",
        f"advantage and length have a correlation of {WITH_LENGTH:g} within the groups, or of -{WITH_LENGTH:g}",
        advantage_by_length,
        "If no reward for length is meant, look at what it rewards (mrl rollouts RUN), at grpo.overlong, and at "
        "grpo.reduction, which decides how much the tokens of a long answer count.",
    ),
    "learned-ends": Rule(
        "loss",
        f"more than {MOSTLY_ENDS:.0%} of the learned tokens of the rows of data only end something",
        learned_ends,
        "Look at the rows (mrl rows RECIPE): answers may be empty, in another column (data.answer, data.messages), or "
        "marked as not to be learned.",
    ),
}
