"""Functions of the user's that a recipe names, such as a loss: `module:function` or `FILE.py:function`.

The loader of a recipe replaces a module that lies beside the recipe by the path of its file. The run keeps a copy of
that file and uses the copy. Every other module is imported by its name: it is installed, or lies in a directory of
`code.include`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Unreadable, read
from megatron_rl.contract.run_records import KeptFiles
from megatron_rl.errors import note_task_code, task_location
from megatron_rl.recipe.python_file import defined_names

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
FUNCTION = re.compile(r"[A-Za-z_]\w*")


class Reference(NamedTuple):
    """A function and the module or file that defines it."""

    place: str
    """Name of a module, or path of a file that ends in .py."""
    function: str

    @classmethod
    def of(cls, text: str) -> Reference:
        """Parse `module:function`. Raises ValueError."""
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
        return str(Reference.of(value))
    if value not in names:
        near = get_close_matches(value, names, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown name {value!r}{hint}; expected {name_or_own_words(names)}")
    return value


def name_or_own_words(names: Sequence[str]) -> str:
    """Describe the values that `name_or_own` accepts."""
    return f"one of {', '.join(names)}, or module:function for one of your own"


def beside(text: str, folder: Path) -> str:
    """Return a value with the absolute path of the file in place of a relative one, or in place of a module that lies
    in `folder`. Other values stay as they are."""
    if not is_own(text):
        return text
    place, function = Reference.of(text)
    file = folder / (Path(place).expanduser() if place.endswith(".py") else Path(*place.split(".")).with_suffix(".py"))
    if place.endswith(".py") or file.is_file():
        return f"{file.absolute()}:{function}"
    return text


def check_file(reference: str) -> None:
    """Raise ValueError if the file of a reference cannot be read or does not define the function. Runs nothing, and
    accepts modules, which only an import can check."""
    place, function = Reference.of(reference)
    file = Path(place)
    if place.endswith(".py") and not {function, "*"} & defined_names(file):
        raise ValueError(f"{file} defines no function {function}")


def load(reference: str) -> Callable[..., Any]:
    """Import the function. Raises ValueError if that fails or it is not callable."""
    place, function = Reference.of(reference)
    check_file(reference)
    try:
        with redirect_stdout(sys.stderr):  # keep the output of an import out of a command's output
            module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        where = task_location(error) or place
        hint = ""
        if isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}."):
            hint = "; put the file beside the recipe, or its directory into code.include, or install the package"
        raise ValueError(f"{where}: {type(error).__name__}: {error}{hint}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"{place}: {function} is {'missing' if found is None else 'not a function'}")
    if not place.endswith(".py"):
        note_task_code(place)
    return found


def import_file(file: Path) -> ModuleType:
    """Import a file as a module of its own, once for each content. Raises what the file raises."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    name = f"mrl_own_{file.stem}_{digest[:16]}"
    if name in sys.modules:
        return sys.modules[name]
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


def kept(reference: str, run: RunDir, patience: float = 0.0) -> str:
    """Replace the file of a reference by the run's copy; return other values as they are.

    patience: seconds for which reading the record of the copies is retried.

    Raises ValueError if the record cannot be read.
    """
    if not is_own(reference) or (file := Reference.of(reference).file) is None:
        return reference
    record = read(KeptFiles, run.kept_files_record, patience)
    if isinstance(record, Unreadable):
        raise ValueError(f"{record}; the run's copies of user code are unknown")
    copies = {} if record is ABSENT else {one.path: run.kept_files / one.name for one in record.files}
    return f"{copies.get(str(file), file)}:{Reference.of(reference).function}"
