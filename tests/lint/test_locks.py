"""Locks hold every package that their environment asks for, at versions that pyproject.toml and the constraints allow,
with hashes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from image_rehearsal import resolved
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
LOCKS: dict[str, Any] = runpy.run_path(str(CONTAINERS / "locks.py"))
ENVIRONMENTS = LOCKS["environments"]()
PYTHONS = ("3.11", "3.12", "3.13")


def in_force(name: str, python: str) -> dict[str, str]:
    """Return the version of each package that pip takes from a lock, on Linux."""
    of = {"python_version": python, "python_full_version": f"{python}.1", "platform_machine": "x86_64", "extra": ""}
    found: dict[str, str] = {}
    for package, versions in LOCKS["pins"](name).items():
        for version, marker in versions:
            if not marker or Requirement(f"{package} ; {marker}").marker.evaluate(of):
                assert package not in found, f"{name}: two versions of {package} for Python {python}"
                found[package] = version
    return found


def test_each_environment_and_image_has_a_lock_and_each_lock_an_environment():
    assert {file.stem for file in (CONTAINERS / "locked").iterdir()} == {*ENVIRONMENTS, *LOCKS["images"]()}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_an_environment_asks_for_is_locked_at_a_version_in_its_range(name):
    asked = ENVIRONMENTS[name]
    for python in PYTHONS:
        locked = in_force(name, python)
        for requirement in map(Requirement, LOCKS["requirements"](asked)):
            if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
                continue
            if asked.gpu or requirement.name != "torch":
                version = locked[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version), f"{requirement} but {version}: make locks OF={name}"


@pytest.mark.parametrize("name", [name for name, asked in ENVIRONMENTS.items() if asked.constraints])
def test_a_lock_keeps_to_its_constraints(name):
    file = CONTAINERS / ENVIRONMENTS[name].constraints
    lines = [line.partition("#")[0].strip() for line in file.read_text().splitlines()]
    for python in PYTHONS:
        locked = in_force(name, python)
        for constraint in map(Requirement, filter(None, lines)):
            if constraint.marker is None or constraint.marker.evaluate({"python_version": python}):
                version = locked.get(canonicalize_name(constraint.name))
                assert version is None or constraint.specifier.contains(version), f"{constraint}: make locks OF={name}"


@pytest.mark.parametrize("name", [name for name, asked in ENVIRONMENTS.items() if asked.beside])
def test_a_lock_changes_no_version_of_the_environment_that_it_joins(name):
    for python in PYTHONS:
        own, joined = in_force(name, python), in_force(ENVIRONMENTS[name].beside, python)
        assert {package: joined[package] for package in own.keys() & joined.keys()} == {
            package: own[package] for package in own.keys() & joined.keys()
        }


def test_every_extra_is_locked():
    extras = LOCKS["_project"]()["project"]["optional-dependencies"]
    for python in PYTHONS:
        locked = {name: in_force(name, python) for name, asked in ENVIRONMENTS.items() if not asked.gpu}
        for extra, texts in extras.items():
            wanted = {canonicalize_name(Requirement(text).name) for text in texts} - {"torch"}
            assert [name for name in locked if wanted <= locked[name].keys() | joined(name, locked)], extra


def joined(name: str, locked: dict[str, dict[str, str]]) -> set[str]:
    beside = ENVIRONMENTS[name].beside
    return set(locked[beside]) if beside else set()


def test_only_a_machine_with_a_gpu_gets_torch_or_packages_of_cuda_from_a_lock():
    """PyPI's torch is built for CUDA, so its hashes are not those of the builds for CPUs."""
    for name, asked in ENVIRONMENTS.items():
        found = {
            package for package in LOCKS["pins"](name) if re.match("torch(audio|codec|vision)?$|nvidia-|cuda-", package)
        }
        assert bool(found) == asked.gpu, f"{name}: name what brings {found} in OF_CUDA of containers/locks.py"


@pytest.mark.parametrize("name", [file.stem for file in sorted((CONTAINERS / "locked").glob("*.txt"))])
def test_every_pin_has_a_hash(name):
    text = (CONTAINERS / "locked" / f"{name}.txt").read_text()
    assert not re.findall(r"^[a-z0-9-]+==.*[^\\]$", text, re.MULTILINE)
    assert len(re.findall(r"^\S+==", text, re.MULTILINE)) == sum(map(len, LOCKS["pins"](name).values())) > 10


@pytest.mark.parametrize("name", LOCKS["images"]())
def test_the_lock_of_an_image_is_its_resolution_on_record(name):
    on_record = resolved(name.removeprefix("image-"))["installed"]
    assert {package: version for package, ((version, _),) in LOCKS["pins"](name).items()} == {
        canonicalize_name(package): version for package, version in on_record.items()
    }, f"make locks OF={name}"
