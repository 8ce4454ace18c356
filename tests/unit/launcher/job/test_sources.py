"""The code that travels with a job: mrl, the environment's package, and the repository of the recipe."""

from __future__ import annotations

import contextlib
import subprocess
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import BadInput
from launcher.host.code import snapshot
from launcher.host.code.snapshot import plan_sources
from launcher.job import code_sources as sources
from launcher.job.code_sources import code_sources, left_out
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir
from megatron_rl.recipe.registry import GROUP


def repository(root: Path) -> Path:
    root.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    return root


def asked(recipe: Path | None, here: Path, *overrides: str, text: str = "") -> dict[str, dict[str, Any]]:
    """The planned sources by name, of the demo or a recipe file that says `text` beside what the demo says."""
    if recipe is not None:
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(load_recipe("demo").text + text)
    with contextlib.chdir(here):
        return {one.name: one for one in code_sources(load_recipe(str(recipe or "demo"), overrides), here)}


def included(found: dict[str, dict[str, Any]]) -> list[str]:
    return [source.path for name, source in found.items() if name[0].isdigit()]


def test_mrl_travels_with_its_entry_points(tmp_path):
    found = asked(None, tmp_path)
    assert {"launcher", "megatron_rl"} < set(found)
    (metadata,) = set(found) - {"launcher", "megatron_rl"}
    assert "mrl.environments" in (Path(found[metadata].path) / "entry_points.txt").read_text()


def test_the_repository_around_a_recipe_travels_by_default(tmp_path):
    mine = repository(tmp_path / "mine")
    (mine / "recipes").mkdir()
    assert included(asked(mine / "recipes" / "my.yaml", mine / "recipes")) == [str(mine)]


@pytest.mark.parametrize("recipe", [None, "elsewhere/my.yaml"])
def test_a_repository_that_does_not_hold_the_recipe_stays(tmp_path, recipe):
    mine = repository(tmp_path / "mine")
    assert included(asked(recipe and tmp_path / recipe, mine)) == []


def test_relative_paths_in_a_recipe_start_from_its_file(tmp_path):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "mine").mkdir()
    found = asked(tmp_path / "recipes" / "my.yaml", tmp_path, text="\ncode: {include: [../mine]}\n")
    assert included(found) == [str(tmp_path / "mine")]


def test_what_is_named_travels_instead_and_relative_paths_of_an_override_start_here(tmp_path):
    mine = repository(tmp_path / "mine")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    found = asked(mine / "my.yaml", mine, f"code.include=[../two, {tmp_path / 'one'}, ../two]")
    assert included(found) == [str(tmp_path / "two"), str(tmp_path / "one")]
    assert included(asked(mine / "my.yaml", mine, "code.include=[]")) == []


def test_every_named_directory_that_is_missing_is_told_with_its_place(tmp_path):
    with pytest.raises(BadInput) as error:
        asked(tmp_path / "my.yaml", tmp_path, text="\ncode:\n  include: [nowhere, neither]\n")
    line = len((tmp_path / "my.yaml").read_text().splitlines())
    place = f"{tmp_path}/my.yaml:{line}: code.include: {tmp_path}"
    assert [one.partition(" on ")[0] for one in error.value.problems] == [
        f"{place}/nowhere: no such directory",
        f"{place}/neither: no such directory",
    ]
    with pytest.raises(BadInput, match=r"^override 'code\.include=\[nowhere\]': code\.include: .*/nowhere: no such"):
        asked(None, tmp_path, "code.include=[nowhere]")


def test_credentials_that_are_not_taken_along_are_named(tmp_path):
    run, mine = RunDir(tmp_path / "run"), tmp_path / "mine"
    mine.mkdir()
    (mine / "a.py").touch()
    snapshot.take(plan_sources([], [str(mine)]), run.code)
    assert left_out(run) is None
    for name in (".env", "b.pem", "c.pem", "d.pem"):
        (mine / name).touch()
    snapshot.update(plan_sources([], [str(mine)]), run.code)
    assert f"say credentials: .env, b.pem, c.pem and 1 more ({run.code_record})" in str(left_out(run))


def test_the_package_of_the_environment_travels_with_its_metadata(tmp_path, monkeypatch):
    site = tmp_path / "site"
    files = {"riddles/__init__.py": "", "riddles-1.dist-info/METADATA": "Name: riddles\nVersion: 1\n"}
    files["riddles-1.dist-info/RECORD"] = "riddles/__init__.py,,\nriddles-1.dist-info/METADATA,,\n"
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    entry = EntryPoint("arithmetic", "riddles:Riddles", GROUP)
    vars(entry)["dist"] = PathDistribution(site / "riddles-1.dist-info")
    monkeypatch.setattr(sources, "entry_points_of", lambda config: [entry])
    monkeypatch.syspath_prepend(str(site))
    assert {"riddles", "riddles-1.dist-info"} < set(asked(None, tmp_path))
    found = asked(None, tmp_path, f"code.include=[{site}]")
    assert "riddles" not in found
    assert "riddles-1.dist-info" in found
