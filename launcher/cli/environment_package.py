"""Start of an environment, written by `mrl environments new`: a program, a class of mrl, or a task set of verifiers."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Literal, get_args

from launcher.cli.environment_templates import (
    AGENT,
    CLASS_MODULE,
    CLASS_PYPROJECT,
    CLASS_TEST,
    PROBLEMS,
    RECIPE,
    TASKSET_MODULE,
    TASKSET_PYPROJECT,
)
from launcher.errors import BadInput, Failed
from megatron_rl.agent.registry import environment_names

Kind = Literal["class", "program", "verifiers"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class _Start:
    """Start of one kind of environment."""

    files: Mapping[str, Template]
    """Templates of paths and of contents."""
    next: Template
    """Command to try it."""


STARTS: dict[Kind, _Start] = {
    "class": _Start(
        {
            "pyproject.toml": CLASS_PYPROJECT,
            "$module/__init__.py": CLASS_MODULE,
            "tests/test_$module.py": CLASS_TEST,
        },
        Template("pip install -e $folder && mrl environments try $name"),
    ),
    "program": _Start(
        {"agent.py": AGENT, "problems.jsonl": PROBLEMS, "recipe.yaml": RECIPE},
        Template(
            "pip install openai && cd $folder && mrl environments try program --answer 7 --answer 0 --env-args "
            "\"{command: ['{python}', agent.py], code: [agent.py], problems: problems.jsonl}\""
        ),
    ),
    "verifiers": _Start(
        {"pyproject.toml": TASKSET_PYPROJECT, "$module/__init__.py": TASKSET_MODULE},
        Template("pip install -e $folder && mrl environments try verifiers/$name --answer 0"),
    ),
}


def write_start(name: str, kind: Kind, folder: Path) -> Iterator[Path]:
    """Write the files of a new environment and yield them.

    Raises:
        BadInput: the name is invalid or taken, or the directory exists.
        Failed: a file cannot be written.
    """
    values = _values(name, folder)
    if kind == "class" and name in environment_names():
        raise BadInput(f"an environment {name!r} is already registered; see `mrl environments`")
    try:
        folder.mkdir(parents=True)
        for file, template in STARTS[kind].files.items():
            path = folder / Template(file).substitute(values)
            path.parent.mkdir(exist_ok=True)
            path.write_text(template.substitute(values), encoding="utf-8")
            yield path
    except FileExistsError as error:
        raise BadInput(f"{folder} already exists; choose another directory with --into") from error
    except OSError as error:
        raise Failed(f"{error.filename or folder}: cannot be written: {error.strerror}") from error


def next_command(name: str, kind: Kind, folder: Path) -> str:
    """Return the command that installs and tries a new environment."""
    return STARTS[kind].next.substitute(_values(name, folder))


def _values(name: str, folder: Path) -> dict[str, str]:
    """Return the values of the templates. Raises BadInput."""
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name) or keyword.iskeyword(module):
        raise BadInput(
            f"{name!r} is not a valid name: use a small letter, then small letters, digits and single dashes"
        )
    cls = "".join(part.capitalize() for part in name.split("-"))
    return {"name": name, "module": module, "cls": cls, "folder": str(folder)}
