"""Python files of the user's, read without being run."""

from __future__ import annotations

import ast
from pathlib import Path


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
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{file}{line}: not valid Python: {getattr(error, 'msg', error)}") from error
