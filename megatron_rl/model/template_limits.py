"""Limits of a chat template, which is a program that comes with a model.

`transformers` renders templates in jinja2's sandbox: they reach no file, module or attribute of Python's own. But in
the sandbox a template may still loop for ever, or double a text until the memory is full. Here it has a time, an amount
of text, and no function whose result may be much longer than what it is given.

Each turn of a loop, call and filter looks at the time. What grows (`*`, `~`, `join`, `replace`, blocks) is measured,
before it is done where one operation may multiply it.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import concat as joined

LIMIT_S = 60.0  # of one rendering; an honest one of a million tokens takes less than a second
MOST = 2**26  # characters of one text, and eighths of a character for each item of a list: 16 million tokens and more
MOST_IN_ALL = 2**31  # the same of everything that one rendering makes, also of what it drops again
MOST_NUMBER = 10**6  # largest width, or number of items
MOST_BITS = 4096  # of a number that is computed
MOST_SOURCE = 2**20  # characters of a template
MOST_INDENT = 16
ITEM = 8
OFTEN = 4096  # items between two looks at the time

WIDEST = 200  # characters that a format makes of each of its characters, with widths below a thousand
SPLITS = frozenset({"split", "rsplit", "splitlines"})
NUMBERED = frozenset({"batch", "center", "indent", "round", "slice", "truncate"})
"""Filters whose numbers say how much they write. Other functions are given numbers of messages, such as arguments."""
LISTS = frozenset({"batch", "list", "slice", "sort", "unique"})
REFUSED_METHODS = frozenset({"expandtabs", "format_map", "maketrans", "translate"})
REFUSED_FILTERS = ("urlize", "wordwrap", "xmlattr")
REFUSED_GLOBALS = ("lipsum",)
MADE, TEXT, TURN = "_made", "_text", "_turns"
"""Filters that `BoundedEnvironment` puts around expressions."""
WIDE = re.compile(r"\d{4}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
"""Finds a width of a thousand in a format, or one that is an argument."""


class TemplateUnbounded(SecurityError):
    """The template takes too long, or writes too much."""


class _Spent:
    """Time and text that one rendering has used."""

    def __init__(self) -> None:
        self.ends = time.thread_time() + LIMIT_S
        self.left = MOST_IN_ALL

    def turn(self) -> None:
        if time.thread_time() > self.ends:
            raise TemplateUnbounded(f"it takes more than {LIMIT_S:g} s")

    def add(self, value: Any) -> Any:
        """Count what an operation has made, and return it."""
        self.turn()
        self.left -= _fits(len(value) if isinstance(value, str | bytes) else _items(value))
        if self.left < 0:
            raise TemplateUnbounded(f"it writes more than {MOST_IN_ALL} characters")
        return value


_spent: ContextVar[_Spent] = ContextVar("_spent")


def _now() -> _Spent:
    try:
        return _spent.get()
    except LookupError:  # constants are computed while a template is compiled
        return _Spent()


def _items(value: Any) -> int:
    return ITEM * len(value) if isinstance(value, list | tuple | dict) else 0


def _fits(size: int) -> int:
    if size > MOST:
        raise TemplateUnbounded(f"it writes a text of more than {MOST} characters")
    return size


def _whole(value: Any) -> int:
    """Size of a value as text: a list may hold the same list many times. Raises TemplateUnbounded."""
    size, waiting, spent = 0, [value], _now()
    for count in itertools.count():
        if not waiting:
            return size
        if count % OFTEN == 0:
            spent.turn()
        one = waiting.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, dict):
            size += ITEM * len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            size += ITEM * len(one)
            waiting += one
        else:
            size += ITEM
        _fits(size)
    raise AssertionError("counting never ends")


def _turns(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        _now().turn()
        yield value


def _product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int) and isinstance(one, str | bytes | list | tuple):
            _fits((len(one) or 1) * max(other, 0) * (1 if isinstance(one, str | bytes) else ITEM))
    if isinstance(left, int) and isinstance(right, int):
        _bits(left.bit_length() + right.bit_length())


def _bits(size: int) -> None:
    if size > MOST_BITS:
        raise TemplateUnbounded(f"it computes a number of more than {MOST_BITS} bits")


def _formatted(text: str, values: Any) -> None:
    if WIDE.search(text):
        raise TemplateUnbounded("a format of it has a width of a thousand characters, or one that it computes")
    _fits(WIDEST * len(text) + (text.count("%") + text.count("{")) * _whole(values))


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    _fits(len(text) + text.count(old) * len(new))


def _divided(text: str, given: tuple[Any, ...]) -> None:
    at = given[0] if given and isinstance(given[0], str) and given[0] else None
    _fits(len(text) + ITEM * (text.count(at) if at else len(text) // 2))


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int | float) and abs(value) > MOST_NUMBER:
            raise TemplateUnbounded(f"it gives the number {value:.3g} to a function; {MOST_NUMBER} is the most")


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    _fits(len(str(text)) + (str(text).count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))


def _as_json(value: Any, *given: Any, **named: Any) -> None:
    for one in (*given, *named.values()):
        parts = one if isinstance(one, list | tuple) else [one]
        if any((part if isinstance(part, int) else len(str(part))) > MOST_INDENT for part in parts):
            raise TemplateUnbounded(f"it indents or separates JSON by more than {MOST_INDENT} characters")
    _fits(_whole(value) * 6)  # \u0000 is the longest form of a character


def _text_of(value: Any, *given: Any, **named: Any) -> None:
    _whole([value, *given, *named.values()])


def _joined(values: Any, between: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(values, list | tuple):
        _fits(_whole(values) + len(values) * len(str(between)))


_BEFORE: dict[str, Callable[..., None]] = {
    "format": lambda text, *given, **named: _formatted(str(text), [given, named]),
    "indent": _indented,
    "join": _joined,
    "pprint": _text_of,
    "replace": _replaced,
    "string": _text_of,
    "tojson": _as_json,
    TEXT: _text_of,
}
"""Filters that may multiply what they are given -> their check."""


class _Filters(dict[str, Callable[..., Any]]):
    """Filters, each with its checks."""

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        check, behind = _BEFORE.get(name), 1 if hasattr(function, "jinja_pass_arg") else 0

        @functools.wraps(function)
        def checked(*given: Any, **named: Any) -> Any:
            _now().turn()
            values = given[behind:]
            if name in NUMBERED:
                _check_numbers((*values[1:], *named.values()))
            if name == "join" and values and not isinstance(values[0], str | list | tuple | dict):
                values = (list(_turns(values[0])), *values[1:])  # an iterator, which can be read once
            if name in LISTS and values and isinstance(values[0], str):
                _fits(ITEM * len(values[0]))
            if check is not None:
                check(*values, **named)
            return _now().add(function(*given[:behind], *values, **named))

        super().__setitem__(name, checked)


class BoundedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """Render with a time and an amount of text. Raises TemplateUnbounded beyond them."""
        token = _spent.set(_Spent())
        try:
            return super().render(*args, **kwargs)
        finally:
            _spent.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    template_class = BoundedTemplate
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known, self.filters = self.filters, _Filters()
        for name, function in known.items():
            if name not in REFUSED_FILTERS:
                self.filters[name] = function
        self.filters[MADE] = self.filters[TEXT] = lambda value: value
        dict.__setitem__(self.filters, TURN, _turns)
        for name in REFUSED_GLOBALS:
            del self.globals[name]
        self.finalize = _shown

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        return str(_now().add(joined(_now().add(part) for part in parts)))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > MOST_SOURCE:
            raise TemplateUnbounded(f"it is longer than {MOST_SOURCE} characters")
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, TURN, [], [], None, None, lineno=loop.lineno)
        for parent in reversed([tree, *tree.find_all(nodes.Node)]):  # the inner ones first
            for field, value in parent.iter_fields():
                if isinstance(value, list):
                    value[:] = [_measured(one) for one in value]
                elif isinstance(value, nodes.Node):
                    setattr(parent, field, _measured(value))
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _now().turn()
        if isinstance(owner := getattr(__obj, "__self__", None), str | bytes | int):
            _check_numbers((*args, *kwargs.values()))
            args = _checked_method(str(getattr(__obj, "__name__", "")), owner, args, kwargs)
        elif getattr(__obj, "__name__", "") == "strftime_now" and args:
            _formatted(str(args[0]), None)
        return _now().add(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _product(left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str):
            _formatted(left, right)
        return _now().add(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        if value.__name__ in REFUSED_METHODS:
            raise TemplateUnbounded(f"it calls {value.__name__}, which templates do not have here")

        def checked(*given: Any, **named: Any) -> str:
            _formatted(str(value.__self__), [given, named])
            return wrapped(*given, **named)

        return checked


def _measured(node: Any) -> Any:
    """Return an expression that makes a text or a list, with its result measured."""
    grows = isinstance(node, nodes.Concat) or (isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice))
    if not grows:
        return node
    if isinstance(node, nodes.Concat):
        node.nodes = [nodes.Filter(one, TEXT, [], [], None, None, lineno=node.lineno) for one in node.nodes]
    return nodes.Filter(node, MADE, [], [], None, None, lineno=node.lineno)


def _checked_method(name: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Check a call of a method of a text, and return its arguments."""
    if name in REFUSED_METHODS:
        raise TemplateUnbounded(f"it calls {name}, which templates do not have here")
    if name == "join" and args:
        args = (list(_turns(args[0])), *args[1:])
        _joined(args[0], owner)
    elif name == "replace":
        _replaced(owner, *args, **kwargs)
    elif name in SPLITS and isinstance(owner, str):
        _divided(owner, args)
    return args


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        _whole(value)
    return value


def bound_templates() -> None:
    """Make `transformers` render chat templates with these limits."""
    from transformers.utils import chat_template_utils

    known = chat_template_utils.ImmutableSandboxedEnvironment
    if known is not BoundedEnvironment:
        chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment
        chat_template_utils._compile_jinja_template.cache_clear()
