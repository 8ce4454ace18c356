"""Functions of the user's that a recipe names, such as a loss: `module:function` or `FILE.py:function`.

The loader of a recipe replaces a module that lies beside the recipe by the path of its file. The run keeps a copy of
that file and uses the copy. Every other module is imported by its name: it is installed, or lies in a directory of
`code.include`. `defined_names` and `imported_names` read a file of Python without running it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, read
from megatron_rl.contract.run_records import KeptFiles
from megatron_rl.recipe.errors import note_task_code, task_location
from megatron_rl.recipe.removed import moved_hint

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FUNCTION = re.compile(r"[A-Za-z_]\w*")


class CodeReference(NamedTuple):
    place: str  # name of a module, or path of a file that ends in .py
    function: str

    @classmethod
    def of(cls, text: str) -> CodeReference:
        place, _, function = text.rpartition(":")
        if not FUNCTION.fullmatch(function) or not (place.endswith(".py") or MODULE.fullmatch(place)):
            raise ValueError(f"{text!r} is not of the form module:function or FILE.py:function")
        return cls(place, function)

    @property
    def file(self) -> Path | None:
        return Path(self.place) if self.place.endswith(".py") else None

    def __str__(self) -> str:
        return f"{self.place}:{self.function}"


def is_own(value: str) -> bool:
    """Whether the value of a key names a function of the user's rather than one of ours."""
    return ":" in value


def name_or_own(value: str, names: Sequence[str]) -> str:
    """Validate a value that is one of `names` or names a function of the user's. Raises ValueError."""
    if is_own(value):
        return str(CodeReference.of(value))
    if value not in names:
        near = get_close_matches(value, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown name {value!r}{hint}; expected {name_or_own_words(names)}")
    return value


def name_or_own_words(names: Sequence[str]) -> str:
    return f"one of {', '.join(names)}, or module:function for one of your own"


def beside(text: str, folder: Path) -> str:
    """Return a value with the absolute path of the file in place of a relative one, or in place of a module that lies
    in `folder`. Other values stay as they are."""
    if not is_own(text):
        return text
    place, function = CodeReference.of(text)
    file = folder / (Path(place).expanduser() if place.endswith(".py") else Path(*place.split(".")).with_suffix(".py"))
    if place.endswith(".py") or file.is_file():
        return f"{file.absolute()}:{function}"
    return text


def check_file(reference: str) -> None:
    """Raise ValueError if the file of a reference cannot be read or does not define the function. Runs nothing, and
    accepts modules, which only an import can check."""
    place, function = CodeReference.of(reference)
    file = Path(place)
    if place.endswith(".py") and not {function, "*"} & defined_names(file):
        raise ValueError(f"{file} defines no function {function}")


def load(reference: str) -> Callable[..., Any]:
    place, function = CodeReference.of(reference)
    if place.endswith(".py"):
        return import_function(Path(place), function)
    with _told(place):
        module = importlib.import_module(place)
    found = _function(module, function, place)
    note_task_code(place)
    return found


def import_function(file: Path, function: str) -> Callable[..., Any]:
    """Import a function from a file. Raises ValueError if that fails or it is not callable."""
    check_file(f"{file}:{function}")
    with _told(str(file)):
        module = import_file(file)
    return _function(module, function, str(file))


def _function(module: ModuleType, name: str, place: str) -> Callable[..., Any]:
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{place}: {name} is {'missing' if found is None else 'not a function'}")
    return cast("Callable[..., Any]", found)


@contextmanager
def _told(place: str) -> Iterator[None]:
    """Replace what an import raises by a ValueError with its place and a hint, and keep what it prints out of the
    output of a command."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = task_location(error) or place
        raise ValueError(f"{where}: {type(error).__name__}: {error}{missing_file_hint(error, place)}") from error


def missing_file_hint(error: BaseException, place: str) -> str:
    """Return what to do if the code at `place` lacks a module or a file that a run does not copy; else nothing.

    place: name of a module, or path of a file.
    """
    if isinstance(error, ModuleNotFoundError):
        if moved := moved_hint(error):
            return moved
        own = place.endswith(".py") or f"{place}.".startswith(f"{error.name}.")
        put = f"put the file beside {'the one that imports it' if place.endswith('.py') else 'the recipe'}"
        return f"; {put}, or its directory into code.include, or install the package" if own else ""
    folder = str(Path(place).parent)
    if isinstance(error, FileNotFoundError) and place.endswith(".py") and str(error.filename).startswith(folder):
        return (
            "; a run has a copy of the file and of the modules beside it that it imports, and nothing else from there: "
            "name other files by their absolute paths"
        )
    return ""


def where_defined(function: Callable[..., Any], file: str = "") -> str:
    """Return the file and line of a function, such as `reward.py:12`. file: place of one that has no code in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else Path(file).name


def modules_beside(file: Path) -> list[Path]:
    """Return the files in the same folder that a Python file imports, directly or through one another, in the order of
    their names. A module of the standard library is never one of them. Raises ValueError if one cannot be read."""
    found, waiting = set[Path](), [file]
    while waiting:
        for name in imported_names(waiting.pop()) - sys.stdlib_module_names:
            module = file.with_name(f"{name}.py")
            if module != file and module not in found and module.is_file():
                found.add(module)
                waiting.append(module)
    return sorted(found)


# A process may need two files of one name: tasks/math/reward.py and tasks/code/reward.py, or a file of the user's and a
# run's older copy of it. `sys.modules` has one `reward`, so the file is loaded under a name with its digest. What it
# imports from its own folder goes by plain names, as everywhere in Python: there two different files `helpers.py` would
# silently be one, which is an error instead.
def import_file(file: Path) -> ModuleType:
    """Import a file as a separate module, once for each content. It can import the modules beside it. Raises what the
    file raises."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    name = f"mrl_own_{file.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    for each in modules_beside(file):
        other = getattr(sys.modules.get(each.stem), "__file__", None)
        if other is not None and Path(other).read_bytes() != each.read_bytes():
            raise ImportError(f"{file} and another file import different modules named {each.stem}: rename one of them")
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class CopiesUnreadable(ValueError):
    """The record of a run's copies of user code cannot be read."""


def kept(reference: str, run: RunDir, patience: float = 0.0) -> str:
    """Replace the file of a reference by the run's copy; return other values as they are.

    patience: seconds for which reading the record of the copies is retried.

    Raises CopiesUnreadable.
    """
    if not is_own(reference) or (file := CodeReference.of(reference).file) is None:
        return reference
    record = read(KeptFiles, run.kept_files_record, patience)
    if isinstance(record, Unreadable):
        raise CopiesUnreadable(f"{record}; the run's copies of user code are unknown")
    copies = {} if record is ABSENT else {one.path: run.kept_files / one.name for one in record.files}
    return f"{copies.get(str(file), file)}:{CodeReference.of(reference).function}"


def defined_names(file: Path) -> set[str]:
    """Return the names that a Python file binds at its top level; * is among them if an import may bind any.

    Raises ValueError if the file cannot be read or is not valid Python.
    """
    tree = _tree(file)
    return {
        name
        for node in tree.body
        for name in (
            [node.name]
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            else [alias.asname or alias.name for alias in node.names]
            if isinstance(node, ast.Import | ast.ImportFrom)
            else [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
        )
    }


def imported_names(file: Path) -> set[str]:
    """Return the first parts of the names of the modules that a Python file imports, anywhere in it.

    Raises ValueError as `defined_names` does.
    """
    nodes = [*ast.walk(_tree(file))]
    whole = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    parts = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in (*whole, *parts)}


def _tree(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise ValueError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested without end
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{file}{line}: not valid Python: {getattr(error, 'msg', error)}") from error
