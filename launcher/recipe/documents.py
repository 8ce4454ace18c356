"""A YAML file of the user's -> its value and, for every complaint about it, the line to point at."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import BadInput
from launcher.recipe.located_yaml import Located, YamlProblems, read
from launcher.recipe.problems import Locate
from megatron_rl.contract.files import read_bytes


def read_text(path: Path) -> str:
    """The text of a regular file. Raises BadInput where it cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: is not UTF-8 text (byte {error.start})") from error


def parse(file: str, text: str, holds: str) -> Located:
    """The mapping in `text`.

    Args:
        file: what to call it in complaints.
        holds: what a mapping is expected of, such as `sections such as model: and grpo:`.

    Raises:
        BadInput: it is not YAML or not a mapping; every problem found, each with its line.
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
    """Where a key was given: its own line, or that of the nearest section around it."""

    def locate(path: tuple[str, ...]) -> tuple[str, bool]:
        for end in range(len(path), 0, -1):
            if path[:end] in document.lines:
                return f"{file}:{document.lines[path[:end]]}", False
        return file, False

    return locate
