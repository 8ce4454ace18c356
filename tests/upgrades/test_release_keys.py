"""Recipes and profiles of each release: what they may hold is either known today, or its removal says what to write."""

from __future__ import annotations

import json
import re
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from list_keys import all_keys
from recorded_runs import CHANGELOG, HERE, RELEASES

from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.recipe.removed import REMOVED, REMOVED_OF_PROFILES

each_release = pytest.mark.parametrize("release", RELEASES)


@cache
def keys_of(release: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((HERE / f"{release}.keys.json").read_text(encoding="utf-8"))
    return found


@cache
def today() -> dict[str, dict[str, Any]]:
    return all_keys()


def is_removed(key: str) -> bool:
    """Whether an error names what replaces a key, or a section around it."""
    name = key.removeprefix("profile.")
    removed = REMOVED_OF_PROFILES if name != key else REMOVED
    return any(f"{name}.".startswith(f"{one}.") for one in removed)


@each_release
def test_each_key_is_known_or_its_removal_is_explained(release: str) -> None:
    assert [key for key in keys_of(release) if key not in today() and not is_removed(key)] == []


@each_release
def test_each_choice_of_a_key_is_known_or_its_removal_is_explained(release: str) -> None:
    unknown = [
        f"{key}={choice}"
        for key, about in keys_of(release).items()
        for choice in about.get("choices", ())
        if key in today() and choice not in today()[key].get("choices", ())
    ]
    assert [one for one in unknown if one not in REMOVED] == []


@each_release
def test_the_changelog_names_each_key_that_is_new_renamed_or_has_another_default(release: str) -> None:
    """Sections that are new stand for their keys."""
    text = CHANGELOG.read_text(encoding="utf-8")
    newer = text[: re.search(rf"^## {re.escape(release)}\b", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    named = set(re.findall(r"`([\w.*()-]+)`", newer))
    before = keys_of(release)
    changed = [key for key in before if key in today() and before[key].get("default") != today()[key].get("default")]
    missing = [key for key in before if key not in today()]
    new = [key for key in today() if key not in before]
    assert [key for key in (*changed, *missing, *new) if not _is_named(key, named, before)] == []


def _is_named(key: str, named: set[str], before: dict[str, Any]) -> bool:
    """args(*) stands for the arguments of every environment."""
    if re.sub(r"args\([^)]*\)", "args(*)", key) in named:
        return True
    section = key
    while section:
        if section in named and (section == key or section not in before):
            return True
        section = section.rpartition(".")[0]
    return False


@each_release
def test_shipped_recipes_load_today(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under their own names, in another folder, as users copy them."""
    with tarfile.open(HERE / f"{release}.tar.xz") as archive:
        archive.extractall(tmp_path, [one for one in archive if one.name.startswith("recipes")], filter="data")
    recipes = sorted((tmp_path / "recipes").glob("*.yaml"))
    assert len(recipes) > 20
    for recipe in recipes:
        load_recipe(str(recipe))
    assert {recipe.stem for recipe in recipes} <= {*shipped_recipes()}, "a name that commands and pages may have"
