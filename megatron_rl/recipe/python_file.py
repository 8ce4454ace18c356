"""Python files of the user's, read without being run."""

from __future__ import annotations

import ast
from pathlib import Path


def defined_names(file: Path) -> set[str]:
    """Return the names that a Python file binds at its top level; * is among them if an import may bind any.

    Raises ValueError if the file cannot be read or is not valid Python.
    """
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise ValueError(f"{file}: {(error.strerror or str(error)).lower()}") from error
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(f"{file}{line}: not valid Python: {getattr(error, 'msg', error)}") from error
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
