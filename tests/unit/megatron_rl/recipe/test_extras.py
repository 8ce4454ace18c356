"""Distributions of an extra, missing ones, and the command that installs them from mrl's own source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.contract.codes import IMAGE_VARIABLE
from megatron_rl.recipe import extras

METADATA = """\
Metadata-Version: 2.1
Name: mrl
Version: 0.1.0
Requires-Dist: click>=8.1
Provides-Extra: colours
Requires-Dist: red-paint>=1; extra == 'colours'
Requires-Dist: blue_paint[thick]<3,>=2; (python_version >= "3.11") and extra == "colours"
Provides-Extra: brushes
Requires-Dist: click>=8; extra == 'brushes'
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Directory of installed packages that comes first on the path, with another mrl in it."""
    (tmp_path / "mrl-0.1.0.dist-info").mkdir()
    (tmp_path / "mrl-0.1.0.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    extras.requirements.cache_clear()
    yield tmp_path
    extras.requirements.cache_clear()


def install(site: Path, name: str) -> None:
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def came_from(site: Path, **record: object) -> str:
    (site / "mrl-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(record))
    return extras.install_command("colours", "brushes")


def test_missing_distributions_of_an_extra_are_listed(site):
    assert extras.names("colours") == ("red-paint", "blue_paint")
    assert extras.missing(["colours", "brushes", "colours"]) == ["red-paint", "blue_paint"]
    install(site, "blue_paint")
    assert extras.missing(["colours", "brushes"]) == ["red-paint"]
    assert extras.names("no-such-extra") == ()


@pytest.mark.parametrize("folder", ["/home/ann/mrl", "/home/ann's/my clones/mrl{1}"])
def test_from_a_clone_the_command_names_the_clone(site, folder):
    url = Path(folder).as_uri()
    editable = shlex.split(came_from(site, url=url, dir_info={"editable": True}))
    assert editable == ["pip", "install", "-e", f"{folder}[colours,brushes]"]
    assert shlex.split(came_from(site, url=url, dir_info={})) == ["pip", "install", f"{folder}[colours,brushes]"]


@pytest.mark.parametrize(
    "record", [None, "{", "[]", '{"url": "file:///tmp/mrl-0.1.0-py3-none-any.whl", "archive_info": {}}']
)
def test_command_without_a_record_never_installs_mrl_from_an_index(site, record):
    if record is not None:
        (site / "mrl-0.1.0.dist-info" / "direct_url.json").write_text(record)
    words = shlex.split(extras.install_command("colours", "brushes"))
    assert words == ["pip", "install", "red-paint>=1", "blue_paint[thick]<3,>=2", "click>=8"]


@pytest.mark.parametrize(
    ("file", "command"), [("pipx_metadata.json", "pipx inject mrl"), ("uv-receipt.toml", "uv pip install --python {}")]
)
def test_the_command_reaches_the_environment_of_a_tool(site, tmp_path, monkeypatch, file, command):
    monkeypatch.setattr(extras.sys, "prefix", str(tmp_path))
    (tmp_path / file).touch()
    assert extras.install_command("brushes") == command.format(tmp_path) + " 'click>=8'"


def test_in_a_container_the_advice_is_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras.needed("math") == f"`{extras.install_command('math')}`"
    monkeypatch.setenv(IMAGE_VARIABLE, "/images/a.sqsh")
    assert "pip" not in extras.needed("math")
    assert "math-verify, which /images/a.sqsh lacks" in extras.needed("math")
