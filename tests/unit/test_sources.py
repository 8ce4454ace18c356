"""Which code travels with a job: mrl, the environment's package, and the repository the recipe lies in."""

from __future__ import annotations

import subprocess
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest

from launcher import sources
from launcher.errors import BadInput
from launcher.recipe import load_recipe
from launcher.sources import code_sources
from megatron_rl.agent.registry import GROUP


def repository(root: Path) -> Path:
    root.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def asked(recipe: Path | None, here: Path, *overrides: str) -> dict[str, dict[str, Any]]:
    """The planned sources by name."""
    return {source["name"]: source for source in code_sources(load_recipe("demo", overrides).config, recipe, here)}


def included(found: dict[str, dict[str, Any]]) -> list[str]:
    return [source["path"] for name, source in found.items() if name[0].isdigit()]


def test_mrl_travels_with_its_entry_points(tmp_path):
    found = asked(None, tmp_path)
    assert {"launcher", "megatron_rl"} < set(found)
    (metadata,) = set(found) - {"launcher", "megatron_rl"}
    assert "mrl.environments" in (Path(found[metadata]["path"]) / "entry_points.txt").read_text()


def test_the_repository_around_a_recipe_travels_by_default(tmp_path):
    mine = repository(tmp_path / "mine")
    (mine / "recipes").mkdir()
    assert included(asked(mine / "recipes" / "my.yaml", mine / "recipes")) == [str(mine)]


@pytest.mark.parametrize("recipe", [None, "elsewhere/my.yaml"])
def test_a_repository_that_does_not_hold_the_recipe_stays(tmp_path, recipe):
    mine = repository(tmp_path / "mine")
    assert included(asked(recipe and tmp_path / recipe, mine)) == []


def test_what_is_named_travels_instead_and_relative_paths_start_here(tmp_path):
    mine = repository(tmp_path / "mine")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    found = asked(mine / "my.yaml", mine, f"code.include=[../two, {tmp_path / 'one'}, ../two]")
    assert included(found) == [str(tmp_path / "two"), str(tmp_path / "one")]
    assert included(asked(mine / "my.yaml", mine, "code.include=[]")) == []


def test_a_named_directory_that_is_missing_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match=r"code\.include: .*/nowhere: no such directory"):
        asked(None, tmp_path, "code.include=[nowhere]")


def test_the_package_of_the_environment_travels_with_its_metadata(tmp_path, monkeypatch):
    site = tmp_path / "site"
    files = {"riddles/__init__.py": "", "riddles-1.dist-info/METADATA": "Name: riddles\nVersion: 1\n"}
    files["riddles-1.dist-info/RECORD"] = "riddles/__init__.py,,\nriddles-1.dist-info/METADATA,,\n"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    entry = EntryPoint("arithmetic", "riddles:Riddles", GROUP)
    vars(entry)["dist"] = PathDistribution(site / "riddles-1.dist-info")
    monkeypatch.setattr(sources, "registered", lambda name: [entry])
    monkeypatch.syspath_prepend(str(site))
    assert {"riddles", "riddles-1.dist-info"} < set(asked(None, tmp_path))
    found = asked(None, tmp_path, f"code.include=[{site}]")
    assert "riddles" not in found
    assert "riddles-1.dist-info" in found
