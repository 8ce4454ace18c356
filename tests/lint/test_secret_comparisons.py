"""Secrets are compared by hmac.compare_digest alone: `==` returns earlier the sooner two texts differ."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEEPS_SECRETS = re.compile(r"compare_digest|import secrets|b\"authorization\"|read_token\(")
SECRET = re.compile(r"_?(secret|secrets|token|tokens|api_key|bearer|proof)")
"""Names of secrets. In a file about the tokens of a model the same word means another thing."""


def name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        node = node.func
    while isinstance(node, ast.Attribute) and node.attr in ("encode", "decode", "strip"):
        node = node.value.func if isinstance(node.value, ast.Call) else node.value
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def compared(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
            names = [name_of(side) for side in (node.left, *node.comparators)]
            yield from ((node.lineno, name) for name in names if SECRET.fullmatch(name))


def test_secrets_are_compared_in_constant_time():
    checked, found = [], []
    for folder in ("launcher", "megatron_rl"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            source = file.read_text(encoding="utf-8")
            if KEEPS_SECRETS.search(source) and "sampling" not in source:
                checked.append(file.name)
                found += [f"{file.relative_to(ROOT)}:{line}: {name}" for line, name in compared(source)]
    assert {"access.py", "peers.py", "bucket_channel.py", "liveness.py"} <= {*checked}
    assert found == []
    assert [*compared("ok = given == self._token or token.strip() in tokens")], "it would be found"
