r"""Normalisation of spelling: \dfrac and \frac, \leq and <=, 70{,}000 and 70000. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

OPENING, CLOSING = "([{⟨", ")]}⟩"
"""Brackets of cleaned text; ⟨ and ⟩ are the braces of a set, \\{ and \\}."""

NEW_LINE = "⏎"
r"""End of a matrix row, \\\\ in LaTeX, as a character that cannot be mistaken for another backslash."""

SYMBOLS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "√": r"\sqrt ",
        "≤": "<=", "≥": ">=", "≠": "!=", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ",
        "π": r"\pi ", "∞": r"\infty ", "±": r"\pm ", "°": r"^\circ ",
        "，": ",", "。": ".", "：": ":", "％": "%", "\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ",
        "€": "", "£": "", "¥": "", "₹": "", "’": "'", "…": r"\ldots ", "≡": r"\equiv ", "ℤ": r"\integers ",
        "ℝ": r"\reals ", "∖": r"\setminus ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
        "‐": "-", "‑": "-", "‒": "-", "—": "-", "﹣": "-", "⁄": "/", "∕": "/", "∶": ":",
    }
)  # fmt: skip
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")

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
        (r",\\!\s*(?=[0-9]{3})", ","),
        (r"\\!", ""),
        (r"\\(?:[,;:> ]|quad|qquad)|~", " "),
        (r"\{([,:])\}", r"\1"),
        (r"\.\.\.", r"\\ldots "),
        (r"([0-9]*\.[0-9]*?)([0-9]{1,6}?)\2\2+\s*\\[lc]?dots[cb]?(?![A-Za-z])", r"\1\\overline{\2}"),
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
        (r"\\\$\s*([0-9][0-9.,]*)$", r"\1\\words{dollars}"),
        (r"\\?\$|\*\*(?![-+0-9A-Za-z(])|^\*\*|`|\\[()\[\]]", " "),
        (r"\\(?:mathbb|mathbf|Bbb)\s*\{?R\}?", r"\\reals "),
        (r"\\(?:mathbb|mathbf|Bbb)\s*\{?Z\}?", r"\\integers "),
        (r"\\(arc)?tg(?![A-Za-z])", r"\\\1tan "),
        (r"\\ctg(?![A-Za-z])", r"\\cot "),
        (r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"\\(?:text|mathrm)\s*\{\s*\(?\s*mod\s*\}", r"\\mod "),
        (r"\(\s*(?:\\[bp]?mod|(?<![A-Za-z])mod)\s*\{?\s*([0-9]+|[A-Za-z])\s*\}?\s*\)", r"\\pmod{\1}"),
        (r"\\p?mod\s*(?:\{\s*([0-9]+|[A-Za-z])\s*\}|([0-9]+|[A-Za-z]))", r"\\pmod{\1\2}"),
        (r"(?<=[0-9])'(?=[0-9]{3}(?![0-9]))", ""),
    )
]

DEEPEST = 12
"""Largest depth of brackets that math-verify may parse: its cost grows with each of them."""
TOWER = re.compile(r"(?:\^\s*[({]*\s*[0-9]+\s*){3}")
UNWRAPPED = ("boxed", "fbox", "mathbf", "boldsymbol", "bm", "underline", "ensuremath", "mathsf", "mathit")
AS_TEXT = ("textbf", "textit", "textrm", "textnormal", "textsf", "mathrm", "mbox", "hbox", "emph", "text")
INFINITY = re.compile(r"\s*[-+]?\s*\\infty\s*")
JOINING = re.compile(r"(?i)\s*(?:and|or)\s*")

THOUSANDS = re.compile(r"(?<![0-9.,])([0-9]{1,3})((?:,[0-9]{3})+)(?![0-9,])")
SPACED_THOUSANDS = re.compile(r"(?<![0-9.,])(?<![0-9] )([0-9]{1,3})((?: [0-9]{3})+)(?![0-9]| [0-9])")


def normalise(text: str) -> str:
    """Normalise the spelling of a text, with blanks only where they separate."""
    text = re.sub(r"\\\\|\\cr(?![A-Za-z])", NEW_LINE, _in_plain_characters(text).translate(SYMBOLS))
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


def _in_plain_characters(text: str) -> str:
    """Replace digits of other scripts, full-width and bold characters, raised digits and fractions in one character by
    ASCII, and drop what has no width."""
    if text.isascii():
        return text
    text = RAISED.sub(lambda raised: f"^{{{unicodedata.normalize('NFKC', raised[0])}}}", text)
    return "".join(filter(None, map(_plain, text)))


def _plain(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Nd":
        return str(unicodedata.digit(character))
    if kind == "Zs":
        return " "
    if kind == "Cf":
        return ""
    wide_or_bold = "\uff01" <= character <= "\uff5e" or "\U0001d400" <= character <= "\U0001d7ff"
    plain = unicodedata.normalize("NFKC", character)
    if kind == "No" and "\u2044" in plain:
        return "\\frac{{{}}}{{{}}}".format(*plain.split("\u2044"))
    return plain if wide_or_bold else character


def _text(inside: str) -> str:
    r"""Return the replacement of \text{inside}: the content, if it is a formula or a conjunction."""
    if JOINING.fullmatch(inside) or any(sign.isdigit() for sign in inside) or INFINITY.fullmatch(inside):
        return f" {inside} "
    if inside.strip() in ("e", "i", "d"):  # upright, as \\mathrm{d}x
        return f" {inside} "
    return rf"\words{{{inside}}}"


def _each_group(text: str, command: str, replace: object) -> str:
    if f"\\{command}" not in text:
        return text
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
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] in OPENING) - (text[place] in CLOSING)
        if depth == 0:
            return place
    return None


def too_deep(text: str) -> bool:
    """Whether a text has more brackets within brackets, or powers of powers, than an answer to a problem."""
    depth = deepest = 0
    for sign in text:
        depth += (sign in OPENING) - (sign in CLOSING)
        deepest = max(deepest, depth)
    return deepest > DEEPEST or TOWER.search(text) is not None


def split(text: str, separator: re.Pattern[str]) -> list[str]:
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
    yield THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    if THOUSANDS.search(text):
        yield text


def without_decimal_comma(text: str) -> str | None:
    """Return 3.5 for 3,5, and 1234.56 for 1.234,56; None if the text is not a number with a decimal comma."""
    match = re.fullmatch(r"(-?)([0-9]+|[0-9]{1,3}(?:[. ][0-9]{3})+),([0-9]+)", text)
    return match and f"{match[1]}{re.sub('[. ]', '', match[2])}.{match[3]}"
