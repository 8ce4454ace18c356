"""Docstrings start with the thing or the verb, and no text uses an idiom that readers have to read twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from parsed import parsed

ROOT = Path(__file__).parents[2]
PYTHON = ("launcher", "megatron_rl", "tests")
TEXTS = (
    "*.md",
    "docs/*.md",
    "containers/*.md",
    "slurm/*",
    "launcher/**/*.yaml",
    "launcher/**/*.j2",
    "launcher/**/*.js",
    "Makefile",
)

OPENERS = {
    *("Of", "That", "See", "To", "By", "For", "In", "With", "From", "Beside", "As", "At", "On", "Until", "Than"),
    *("Where", "Whose", "Who", "Which", "When", "What", "It", "They", "Those"),
}
"""First words that leave the reader to guess the subject of a docstring."""

IDIOMS = {
    r"\b(goes|gone|going|go|went) on with\b": "resume, continue",
    r"\b(come|comes|came|coming) to nothing\b": "fail",
    r"\bbut for\b": "except",
    r"\bnot to be had\b": "unavailable",
    r"\b(tell|tells|told|telling)\b": "notify, report, say",
    r"\banew\b": "again",
    r"\blest\b": "so that ... not",
    r"\bwhoever\b": "anyone who, the process that",
    r"\bof (which|whom) nothing is said\b": "missing from ...",
    r"\bas many\b(?! as\b)(?=.{1,60}\bas\b)": "the number of",
    r"\bwhat is said of\b": "the report of ...",
    r"(?<![Tt]here )\b(is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|one\b)": "is not a",
    r"\bof (its|their|his) own\b(?! \w)": "its own",
    r"\b(end|ends|ended|leave|leaves|left|stop|stops|stopped|close|closes|closed|exit|exits) in order\b": "cleanly",
    r"\bthe (step|version|attempt|phase|one) before\b(?! (it|the|a|that|this)\b)": "the previous",
    r"\b(shall|(have|has|had) to)\b(?! do with\b)": "must, needs to",
    r"\bunder way\b": "in progress, unfinished",
}
"""Idiom -> what to write instead."""


def python_files() -> list[Path]:
    return [file for top in PYTHON for file in sorted((ROOT / top).rglob("*.py"))]


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, including those of fields and constants."""
    for node in ast.walk(parsed(file)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def comments(file: Path) -> Iterator[tuple[int, str]]:
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def messages(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string."""
    for node in ast.walk(parsed(file)):
        match node:
            case ast.Constant(value=str(text)):
                yield node.lineno, text


def test_docstrings_start_with_their_subject() -> None:
    opening = re.compile(rf"""^\s*[rRuU]?["']\W*({"|".join(OPENERS)})\b""", re.MULTILINE)
    candidates = [file for file in python_files() if opening.search(file.read_text(encoding="utf-8"))]
    assert [
        f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0][:60]}"
        for file in candidates
        for line, text in docstrings(file)
        if (word := re.match(r"\W*(\w+)", text)) and word[1] in OPENERS
    ] == []


def test_no_idiom_in_the_text_of_python_files() -> None:
    """Strings of tests are not read: texts of models and of other programs may say anything."""
    found = []
    for file in python_files():
        if file == Path(__file__) or not idioms(without_marks(file.read_text(encoding="utf-8"))):
            continue
        own = docstrings(file) if file.relative_to(ROOT).parts[0] == "tests" else messages(file)
        for line, text in (*own, *comments(file)):
            found += [f"{file.relative_to(ROOT)}:{line}: {idiom}" for idiom in idioms(text)]
    assert found == []


def without_marks(source: str) -> str:
    """Return source without quotes, escapes and signs of comments, which may separate the words of one text. Few files
    have idioms in it, and only those are parsed."""
    return re.sub(r"""\\\w|["'\\#]""", " ", source)


def test_no_idiom_in_the_other_texts() -> None:
    files = [file for pattern in TEXTS for file in sorted(ROOT.glob(pattern)) if file.is_file()]
    assert len(files) > 20
    assert [
        f"{file.relative_to(ROOT)}:{number}: {idiom}"
        for file in files
        for number, line in enumerate(io.StringIO(file.read_text(encoding="utf-8")), 1)
        for idiom in idioms(line)
    ] == []


def idioms(text: str) -> list[str]:
    """Idioms in a text, each with what to write instead."""
    flat = " ".join(text.split())
    return [f"{found[0]!r} -> {instead}" for pattern, instead in IDIOMS.items() if (found := re.search(pattern, flat))]
