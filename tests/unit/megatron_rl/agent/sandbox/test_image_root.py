"""An image that is unpacked once a node: for several at a time, and after one that was killed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_rl.agent.sandbox.image_root import MAGIC, root_of

UNPACKS = """#!/bin/sh
mkdir -p "$5/usr"
echo whole > "$5/usr/file"
chmod 555 "$5" "$5/usr"
echo >> "{unpacked}"
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Image that a small unsquashfs unpacks; `unpacked` beside it has a line for each time."""
    (programs := tmp_path / "programs").mkdir()
    (unsquashfs := programs / "unsquashfs").write_text(UNPACKS.format(unpacked=tmp_path / "unpacked"))
    unsquashfs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    (file := tmp_path / "image.sqsh").write_bytes(MAGIC)
    return file


def unpacked(image: Path) -> int:
    return len((image.parent / "unpacked").read_text().splitlines())


@pytest.mark.timeout(60)
def test_two_ranks_of_a_node_share_an_image_and_the_last_one_deletes_it(image: Path) -> None:
    with root_of(image) as root:
        with root_of(image) as same:
            assert same == root
        assert (root / "usr/file").read_text() == "whole\n"
    assert unpacked(image) == 1
    assert not [each for each in root.parent.iterdir() if each.is_dir()]
    with root_of(image) as root:
        assert (root / "usr/file").exists() and unpacked(image) == 2


def test_what_is_left_of_an_image_is_not_taken_for_it(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path, **_: object) -> None:
        if (file := folder / "usr/file").exists():
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as then:
        then.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt), root_of(image):
            pass
    with root_of(image) as root:
        assert (root / "usr/file").read_text() == "whole\n"
