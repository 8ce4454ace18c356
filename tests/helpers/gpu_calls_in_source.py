"""Calls into packages that only GPUs use, found in the project's source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from parsed import parsed

PACKAGE = Path(__file__).parents[2] / "megatron_rl"
ROOTS = (
    "apex",
    "flash_attn",
    "megatron.core.extensions",
    "torch.cuda.CUDAGraph",
    "torch.cuda.graph",
    "torch.cuda.graph_pool_handle",
    "torch.cuda.power_draw",
    "torch.distributed.ProcessGroupNCCL",
    "torch.nn.attention",
    "transformer_engine",
)
"""Modules and names that CPUs never run, or run otherwise. Of torch.cuda those that not every torch has had."""


@dataclass(frozen=True, slots=True)
class Found:
    """A call; without arguments also the base of a class, or what is passed to a call."""

    target: str
    """Full name, such as flash_attn.flash_attn_varlen_func."""
    positional: int
    keywords: frozenset[str]
    place: str
    """File and line."""


def calls_of(file: Path) -> Iterator[Found]:
    """Yield the uses of names that a file imports from ROOTS, or reaches as attributes of `torch`."""
    tree = parsed(file)
    names = dict(_imported(tree))

    def target(node: ast.expr) -> str | None:
        attributes = []
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in names:
            return None
        full = ".".join([names[node.id], *reversed(attributes)])
        return full if f"{full}.".startswith(tuple(f"{root}." for root in ROOTS)) else None

    for node in ast.walk(tree):
        place = f"{file.relative_to(PACKAGE.parent)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Call) and (full := target(node.func)):
            starred = sum(isinstance(argument, ast.Starred) for argument in node.args)
            assert all(keyword.arg for keyword in node.keywords), f"{place}: write the parameters' names"
            yield Found(
                full, len(node.args) - starred, frozenset(keyword.arg or "" for keyword in node.keywords), place
            )
        if isinstance(node, ast.Call):
            yield from (Found(full, 0, frozenset(), place) for one in node.args if (full := target(one)))
        elif isinstance(node, ast.ClassDef):
            yield from (Found(full, 0, frozenset(), place) for base in node.bases if (full := target(base)))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (name in the file, full name) of each import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (2 * (alias.name.partition(".")[0],))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


@cache
def all_calls() -> tuple[Found, ...]:
    """Calls in all files that have the words of one of ROOTS; the others need no parsing."""
    words = [{*root.split(".")} for root in ROOTS]
    files = [
        file
        for file in sorted(PACKAGE.rglob("*.py"))
        if any(map({*re.findall(r"\w+", file.read_text(encoding="utf-8"))}.issuperset, words))
    ]
    return tuple(found for file in files for found in calls_of(file))
