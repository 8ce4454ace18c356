"""Answers in words: Tuesday, four, no solution, all real numbers, (B) 12, 3:45 p.m. Pure."""

from __future__ import annotations

import re

from megatron_rl.agent.environments.math.tokens import FUNCTIONS

NAMES_OF_FUNCTIONS = frozenset((*FUNCTIONS, "log", "lg", "sqrt", "pi"))
JOINERS = frozenset(("and", "or"))
DENIAL = re.compile(r"(?i)(?<![a-z])(?:not|no|never|if|unless|except)(?![a-z])|\\neg")
OMISSION = re.compile(r"\\[lcdv]?dots[cbmio]?(?![A-Za-z])|\.\.\.")
WORDS = re.compile(r"\\words\{([^{}]*)\}")
SMALL = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS = {name: 10 * ten for ten, name in enumerate("twenty thirty forty fifty sixty seventy eighty ninety".split(), 2)}  # noqa: SIM905
NUMBER = re.compile(rf"({'|'.join(TENS)})(?:[- ]({'|'.join(SMALL[1:10])}))?|({'|'.join(SMALL)})", re.IGNORECASE)
CHOICE = re.compile(r"(?i:(?:option|choice|answer)\s*)?(?:\(([A-J])\)|([A-J])\s*[.:)])\s*(.+)", re.DOTALL)
ANOTHER_CHOICE = re.compile(r"\([A-J]\)|(?<![A-Za-z])[A-J][.:)]|(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
CLOCK = re.compile(r"(1[0-2]|0?[1-9])(?::([0-5][0-9]))?\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)


def bare(text: str) -> str:
    return WORDS.sub(r" \1 ", text).strip()


def words_of(text: str) -> list[str]:
    """Return the words that a formula contains, without single letters."""
    return [word for inside in WORDS.findall(text) for word in re.findall("[A-Za-z]{2,}", inside)]


def number_in_words(text: str) -> int | None:
    """Return 21 for twenty-one; None if the text is not a number below a hundred."""
    match = NUMBER.fullmatch(bare(text))
    if match is None:
        return None
    ten, unit, small = (part and part.lower() for part in match.groups())
    return SMALL.index(small) if small else TENS[ten] + (SMALL.index(unit) if unit else 0)


def choice(text: str) -> tuple[str, str] | None:
    match = CHOICE.fullmatch(bare(text))
    if match is None or ANOTHER_CHOICE.search(match[3]) or DENIAL.search(match[3]):
        return None
    return match[1] or match[2], match[3]


def time_of_day(text: str) -> str | None:
    """Return 3:45 pm for any way to write it; None if the text is not a time with its half of the day."""
    match = CLOCK.fullmatch(bare(text))
    return match and f"{int(match[1])}:{match[2] or '00'} {match[3].lower()}m"


def is_prose(text: str) -> bool:
    """Whether a text contains words and so is not a formula: a number inside a sentence is not an answer."""
    words = re.findall(r"(?<![A-Za-z\\])[A-Za-z]{3,}", text)
    return any(word not in NAMES_OF_FUNCTIONS for word in words)


def only_words(text: str) -> str | None:
    """Return the words in lower case; None if the text is not only words."""
    plain = bare(text)
    words = re.findall(r"[A-Za-z]+", plain)
    if re.search(r"[0-9\\^_=<>+*/|]", plain) or not words:
        return None
    as_text = plain != text and max(map(len, words)) > 1
    if as_text or len(words[0]) > 3 or (len(words) > 1 and max(map(len, words)) > 2 and not {*words} & JOINERS):
        return None if {*words} & NAMES_OF_FUNCTIONS else " ".join(words).lower()
    return None
