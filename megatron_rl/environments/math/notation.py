r"""Normalisation of spelling: \dfrac and \frac, \leq and <=, 70{,}000 and 70000. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

OPENING, CLOSING = "([{⟨", ")]}⟩"
"""Brackets of cleaned text; ⟨ and ⟩ are the braces of a set, \\{ and \\}."""

NEW_LINE = "⏎"
r"""End of a matrix row, \\\\ in LaTeX, as a character that cannot be mistaken for another backslash."""

SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "√": r"\sqrt ",
        "≤": "<=", "≥": ">=", "≠": "!=", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ",
        "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "°": r"^\circ ",
        "，": ",", "。": ".", "：": ":", "％": "%", "\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ",
        "€": "", "£": "", "¥": "", "₹": "", "’": "'",
    }
)  # fmt: skip

SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?=[^A-Za-z]|\\[{}])\.?(?!\d)", ""),
        (r"\\(?:displaystyle|textstyle|limits|mathstrut|rm|bf|it)(?![A-Za-z])", ""),
        (r"\\(?:lbrace|\{)", "⟨"),
        (r"\\(?:rbrace|\})", "⟩"),
        (r"\\(?:text)?color\s*\{\w+\}|\\(?:therefore|checkmark|blacksquare|square)(?![A-Za-z])", ""),
        (r"\\langle", "("),
        (r"\\rangle", ")"),
        (r"\\!", ""),
        (r"\\(?:[,;:> ]|quad|qquad)|~", " "),
        (r"\{,\}", ","),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])", "<="),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])", ">="),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\(?:neq|ne)(?![A-Za-z])", "!="),
        (r"\\(?:varnothing|empty)(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:degree|degrees)(?![A-Za-z])", r"^\\circ"),
        (r"(?<![A-Za-z\\])(?:infinity|infty|oo)(?![A-Za-z])", r"\\infty"),
        (r"\\operatorname\s*\{([A-Za-z]+)\}", r"\\\1 "),
        (r"(?<![A-Za-z\\])(?:percentage|percent|pct)(?![A-Za-z])", "%"),
        (r"\\(?:text|mathrm|mbox)\s*\{\s*(?:percentage|percent|pct|%)\s*\}", "%"),
        (r"\\%", "%"),
        (r"\\?\$|\*\*(?![-+0-9A-Za-z(])|^\*\*|`|\\[()\[\]]", " "),
        (r"\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?", r"\\reals "),
        (r"(?<=[0-9])'(?=[0-9]{3}(?![0-9]))", ""),
    )
]

UNWRAPPED = ("boxed", "fbox", "mathbf", "boldsymbol", "bm", "underline", "ensuremath", "mathsf", "mathit")
AS_TEXT = ("textbf", "textit", "textrm", "textnormal", "textsf", "mathrm", "mbox", "hbox", "emph", "text")
JOINING = re.compile(r"(?i)\s*(?:and|or)\s*")

THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:,[0-9]{3})+)(?![0-9,])")
SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])(?<![0-9] )([0-9]{1,3})((?: [0-9]{3})+)(?![0-9]| [0-9])")


def normalise(text: str) -> str:
    """Normalise the spelling of a text, with blanks only where they separate."""
    text = re.sub(r"\\\\|\\cr(?![A-Za-z])", NEW_LINE, text.translate(SYMBOLS))
    if "matrix" not in text and "array" not in text:
        text = re.sub(rf"{NEW_LINE}(?=[A-Za-z])", lambda _: "\\", text).replace(
            NEW_LINE, " "
        )  # \\\\frac, from JSON that was escaped twice
    for pattern, spelling in SPELLINGS:
        text = pattern.sub(spelling, text)
    for name in UNWRAPPED:
        text = _each_group(text, name, lambda inside: inside)
    for name in AS_TEXT:
        text = _each_group(text, name, _text)
    text = SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), " ".join(text.split()))
    return text.strip(" ").rstrip(".,;: ").strip()


def _text(inside: str) -> str:
    r"""Return the replacement of \text{inside}: the content, if it is a formula or a conjunction."""
    if JOINING.fullmatch(inside) or any(sign.isdigit() for sign in inside):
        return f" {inside} "
    return rf"\words{{{inside}}}"


def _each_group(text: str, command: str, replace: object) -> str:
    parts, place = [], 0
    for match in re.finditer(rf"\\{command}\s*\{{", text):
        if match.start() < place:
            continue
        end = closing(text, match.end() - 1)
        if end is None:
            break
        parts += [text[place : match.start()], replace(_each_group(text[match.end() : end], command, replace))]  # type: ignore[operator]
        place = end + 1
    return "".join([*parts, text[place:]])


def closing(text: str, opening: int) -> int | None:
    """Return the index of the bracket that closes the one at `opening`; None if it is not closed."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in OPENING) - (text[place] in CLOSING)
        if depth == 0:
            return place
    return None


def split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split at separators outside all brackets."""
    parts, begun, depth, place = [], 0, 0, 0
    while place < len(text):
        depth += (text[place] in OPENING) - (text[place] in CLOSING)
        match = separator.match(text, place) if depth == 0 else None
        if match and match.end() > place:
            parts.append(text[begun:place])
            begun = place = match.end()
        else:
            place += 1
    return [part.strip() for part in (*parts, text[begun:])]


def readings(text: str) -> Iterator[str]:
    """Yield the readings of a text: 1,234 is one number or two."""
    yield THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    if THOUSANDS.search(text):
        yield text


def without_decimal_comma(text: str) -> str | None:
    """Return 3.5 for 3,5, and 1234.56 for 1.234,56; None if the text is not a number with a decimal comma."""
    match = re.fullmatch(r"(-?)([0-9]+|[0-9]{1,3}(?:[. ][0-9]{3})+),([0-9]+)", text)
    return match and f"{match[1]}{re.sub('[. ]', '', match[2])}.{match[3]}"
