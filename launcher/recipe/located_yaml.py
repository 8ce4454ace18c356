"""YAML of users, read safely and with the line of every key, so that later errors can point at it.

Differs from PyYAML's SafeLoader where a recipe would be misread silently: `1e-3` is a number (YAML 1.1 wants `1.0e-3`),
`4:00:00` is text (YAML 1.1 makes it 14400), a bare `=` and a key `on` are text, and a key given twice is an error
instead of the last one winning. Values that YAML readers disagree about are refused: `0100` (64 or 100), `0x10`,
`1_000`, `yes`, `2026-11-21`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from launcher.errors import BadInput
from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.text import size

if TYPE_CHECKING:  # mrl status reads YAML and checks no recipe, and pydantic is slow to import
    from launcher.recipe.problems import KeyPath, Locate

DEEPEST = 50  # levels of nested collections
LARGEST = 16 << 20  # bytes of a file
MOST = 100_000  # values, with aliases expanded
_TOO_DEEP = f"is nested more than {DEEPEST} deep"


class YamlProblems(Exception):
    """The text cannot be used. `problems` are (line, message); the line is None where YAML gives none."""

    def __init__(self, problems: list[tuple[int | None, str]]) -> None:
        self.problems = problems
        super().__init__("; ".join(what for _, what in problems))


@dataclass(frozen=True, slots=True)
class Located:
    value: Any
    lines: dict[KeyPath, int]


_YAML = "tag:yaml.org,2002:"
_INT, _FLOAT = f"{_YAML}int", f"{_YAML}float"
_BOOL, _TEXT = f"{_YAML}bool", f"{_YAML}str"
_TAGS = {
    yaml.ScalarNode: {_INT, _FLOAT, _BOOL, _TEXT, f"{_YAML}null", f"{_YAML}timestamp"},
    yaml.SequenceNode: {f"{_YAML}seq"},
    yaml.MappingNode: {f"{_YAML}map"},
}
"""Kind of node -> tags that its value may have: no sets, ordered mappings, bytes or objects."""
_MOST_DIGITS = 19  # of a whole number: larger ones do not fit into 64 bits, and some not into a float


_Fastest = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C if PyYAML was built with libyaml


class _Loader(_Fastest):  # type: ignore[valid-type, misc]
    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        if first != "="
    }


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Quotes text that a reader would take for a number."""


_DIGITS = list("-+.0123456789")
_UNLIKE = re.compile(r"[-+]?(0[0-9][0-9_.]*|0[box][0-9a-fA-F_]+|[.]?[0-9][0-9.]*_[0-9_.]*([eE][-+]?[0-9_]+)?)")
"""Numbers that some YAML readers take for other numbers, or for text."""
_Dumper.add_implicit_resolver(_INT, re.compile(f"^({_UNLIKE.pattern})$"), _DIGITS)
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+)$"), _DIGITS)
for _either in (_Loader, _Dumper):
    _either.add_implicit_resolver(
        _FLOAT,
        re.compile(
            r"^[-+]?((\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\d[\d_]*\.\d*|\.\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"
        ),
        _DIGITS,
    )


def read_text(path: Path) -> str:
    """Read a regular file, with lines ended by \\n alone: sbatch rejects scripts with \\r.

    Raises:
        BadInput: it cannot be read, is not UTF-8, or has more than LARGEST bytes.
    """
    try:
        if (found := path.stat()).st_size > LARGEST:
            raise BadInput(f"{path}: has {size(found.st_size)}, more than the {size(LARGEST)} that are read of YAML")
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no file can have this name"
        raise BadInput(f"{path}: cannot be read: {why}") from error


def read_mapping(file: str, text: str, holds: str) -> Located:
    """Parse the mapping in `text`. Raises BadInput: the text is not YAML or not a mapping; every problem found, each
    with its line.

    Args:
        file: name in error messages.
        holds: expected content, such as `sections such as model: and grpo:`.
    """
    try:
        document = read(text)
    except YamlProblems as error:
        raise BadInput(
            f"{file}:{line}: {what}" if line is not None else f"{file}: {what}" for line, what in error.problems
        ) from error
    if not isinstance(document.value, dict):
        raise BadInput(f"{file}: expected a mapping of {holds}")
    return document


def locator(file: str, document: Located) -> Locate:
    """Return a function from a key to its place: its own line, or that of the nearest section around it."""

    def locate(path: tuple[str, ...]) -> tuple[str, bool]:
        for end in range(len(path), 0, -1):
            if path[:end] in document.lines:
                return f"{file}:{document.lines[path[:end]]}", False
        return file, False

    return locate


def dump(value: Any) -> str:
    """Write YAML that reads back as `value`, with `read` and with yaml.safe_load."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    if set(text) & set("\x85\u2028\u2029"):  # line breaks in YAML, which PyYAML writes raw and reads back as others
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    return text


def read(text: str) -> Located:
    """Parse one YAML document. Raises YamlProblems: it is not YAML, or has duplicate, non-text or self-referring keys;
    all of these at once."""
    try:
        _refuse_bombs(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            lines: dict[KeyPath, int] = {}
            problems: list[tuple[int | None, str]] = []
            if node is not None:
                _walk(node, (), (), lines, problems)
            if problems:
                raise YamlProblems(problems)
            value = None if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise YamlProblems([_explain(error, text)]) from error
    except UnicodeEncodeError as error:
        raise YamlProblems([(None, "is not UTF-8 text")]) from error
    except (ValueError, IndexError) as error:  # IndexError: !!int ""
        raise YamlProblems([(None, f"not valid YAML: {error}")]) from error
    return Located(value, lines)


def _refuse_bombs(text: str) -> None:
    """Refuse text that expands without bound: aliases of aliases, and deeply nested brackets. Raises YamlProblems, and
    yaml.YAMLError."""
    # The text is read as a stream of events, before anything is built, because building is what a bomb makes expensive:
    # `a: &a [x, x]`, `b: &b [*a, *a]`, `c: [*b, *b]`, ... doubles with each line. Each open collection counts the
    # values inside it, and an alias counts as much as its anchor, so the sum is the size after expansion, found in one
    # pass over the short text. A collection that refers to itself counts 1 here; `_walk` refuses it.
    sizes: dict[str, int] = {}  # anchor -> values that it stands for
    open_ones: list[tuple[str | None, int]] = [(None, 0)]  # open collections: anchor, values so far

    def add(anchor: str | None, size: int) -> None:
        if anchor is not None:
            sizes[anchor] = size
        around, before = open_ones.pop()
        open_ones.append((around, before + size))

    for event in yaml.parse(text, Loader=_Fastest):
        if isinstance(event, yaml.AliasEvent):
            add(None, sizes.get(str(event.anchor), 1))
        elif isinstance(event, yaml.ScalarEvent):
            add(event.anchor, 1)
        elif isinstance(event, yaml.CollectionStartEvent):
            open_ones.append((event.anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            add(*open_ones.pop())
        line = event.start_mark.line + 1 if event.start_mark else None
        if len(open_ones) > DEEPEST:
            raise YamlProblems([(line, _TOO_DEEP)])
        if open_ones[-1][1] > MOST:
            raise YamlProblems([(line, f"expands to more than {MOST} values, aliases included")])


def _walk(
    node: yaml.Node,
    path: KeyPath,
    above: tuple[yaml.Node, ...],
    lines: dict[KeyPath, int],
    problems: list[tuple[int | None, str]],
) -> None:
    if node in above:
        problems.append((node.start_mark.line + 1, f"{'.'.join(path)}: refers to itself"))
    elif node.tag not in _TAGS[type(node)]:
        name = f"{'.'.join(path)}: " if path else ""
        problems.append((node.start_mark.line + 1, f"{name}has the YAML tag {node.tag}; remove it"))
    elif isinstance(node, yaml.ScalarNode):
        if doubt := _doubt(node):
            name = f"{'.'.join(path)}: " if path else ""
            problems.append((node.start_mark.line + 1, f"{name}{node.value} {doubt}"))
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, str(index))] = item.start_mark.line + 1
            _walk(item, (*path, str(index)), (*above, node), lines, problems)
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                _walk(value, path, (*above, node), lines, problems)
                continue
            if key.tag == _BOOL and isinstance(key, yaml.ScalarNode):  # `on`, which YAML 1.1 makes true
                key.tag = _TEXT
            if key.tag != _TEXT or not isinstance(key, yaml.ScalarNode):
                given = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a collection"
                problems.append((line, f"keys are text, got {given}"))
                continue
            name = ".".join((*path, key.value))
            if key.value in seen:
                problems.append((line, f"{name}: given twice, first in line {seen[key.value]}"))
                continue
            seen[key.value] = line
            lines[(*path, key.value)] = line
            _walk(value, (*path, key.value), (*above, node), lines, problems)


def _doubt(node: yaml.ScalarNode) -> str:
    """Say why YAML readers may disagree about a value, and what to write instead; empty if they agree."""
    kind = node.tag.rpartition(":")[2]
    if kind == "timestamp":
        return "is a date to some readers of YAML and text to others; put it in quotes"
    if kind == "bool" and node.value.lower() not in ("true", "false"):
        return "is true or false to some readers of YAML and text to others; write true or false, or put it in quotes"
    if kind == "int" and sum(character.isdigit() for character in node.value) > _MOST_DIGITS:
        return f"has more than {_MOST_DIGITS} digits, and no number of a recipe is that large"
    is_number = kind in ("int", "float") or (kind == "str" and not node.style)
    if is_number and _UNLIKE.fullmatch(node.value):
        return (
            "is another number, or text, to some readers of YAML; write a number without leading zeros, 0x, 0b or _, "
            "and put text in quotes"
        )
    return ""


def _explain(error: yaml.YAMLError, text: str) -> tuple[int | None, str]:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).split("\n")[0]
    context = getattr(error, "context", None)
    line = mark.line + 1 if mark else None
    if "exceeded maximum nesting depth" in what:  # libyaml's own limit, reached before ours because it reads ahead
        return line, _TOO_DEEP
    if mark and any(re.match(r" *\t", one) for one in text.split("\n")[mark.line : mark.line + 1]):
        return line, "is indented by a tab, and YAML allows only spaces; replace it"
    return (
        line,
        f"not valid YAML: {what}"
        + (f" ({context})" if context else "")
        + (f", column {mark.column + 1}" if mark else ""),
    )
