"""Sizes that no function and no class of the product exceeds."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from parsed import parsed

ROOT = Path(__file__).parents[2]
LINES, PARAMETERS, METHODS = 60, 8, 20
Function = ast.FunctionDef | ast.AsyncFunctionDef


def test_functions_and_classes_are_small() -> None:
    larger = {each for side in ("launcher", "megatron_rl") for each in _larger(ROOT / side)}
    assert larger == set(), "split these: see LINES, PARAMETERS and METHODS"


def _larger(side: Path) -> Iterator[str]:
    for file in sorted(side.rglob("*.py")):
        for node in ast.walk(parsed(file)):
            if (isinstance(node, ast.ClassDef) and _methods(node) > METHODS) or (
                isinstance(node, Function) and _is_large(node)
            ):
                yield f"{file.relative_to(ROOT)} {node.name}"


def _methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, Function) for each in node.body)


def _is_large(node: Function) -> bool:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    parameters = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
    # A command's parameters are its options, and a kernel's are pointers and strides.
    decorators = " ".join(map(ast.unparse, node.decorator_list))
    free = "command(" in decorators or "triton.jit" in decorators
    return lines > LINES or (parameters > PARAMETERS and not free)
