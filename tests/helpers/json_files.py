"""Raw contents of the JSON files in a run directory, without the product's readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: str | Path) -> Any:
    """Return the value in `path`; None if the file does not exist."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def read_json_lines(path: str | Path) -> list[Any]:
    """Return the complete lines of a JSON-lines file; none if it does not exist."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # torn by a crash
            continue
    return found


def write_json(path: str | Path, value: Any) -> None:
    write_whole(path, json.dumps(value).encode())


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file atomically: a concurrent reader finds all of the content or no file."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.draft")  # hidden from a reader's pattern such as pid.*
    draft.write_bytes(content)
    draft.rename(path)


def append_json_line(path: str | Path, value: Any) -> None:
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")
