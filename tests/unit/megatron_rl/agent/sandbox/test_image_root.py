"""An image that is unpacked once a node: for several at a time, and after one that was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.agent.sandbox.image_root import MAGIC, root_of
from megatron_rl.contract.owned_folders import remove_ownerless

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


def nothing_is_left(image: Path) -> bool:
    return not [*(image.parent / "temporary").iterdir()]


def unpacked(image: Path) -> int:
    return len((image.parent / "unpacked").read_text().splitlines())


@pytest.mark.timeout(60)
def test_two_ranks_of_a_node_share_an_image_and_the_last_one_deletes_it(image: Path) -> None:
    with root_of(image) as root:
        with root_of(image) as same:
            assert same == root
        assert (root / "usr/file").read_text() == "whole\n"
    assert unpacked(image) == 1
    assert nothing_is_left(image)
    with root_of(image) as root:
        assert (root / "usr/file").exists() and unpacked(image) == 2


def test_what_is_left_of_an_image_is_not_taken_for_it(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path, **_: object) -> None:
        if (file := folder / "root/usr/file").exists():
            file.unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as then:
        then.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt), root_of(image):
            pass
    with root_of(image) as root:
        assert (root / "usr/file").read_text() == "whole\n"
    assert nothing_is_left(image)


USER = """
import sys
from pathlib import Path
from megatron_rl.agent.sandbox.image_root import root_of
with root_of(Path(sys.argv[1])) as root:
    print(root, flush=True)
    sys.stdin.read()
"""


def test_the_next_run_deletes_the_image_of_a_killed_one_and_none_that_is_used(image: Path) -> None:
    temporary = image.parent / "temporary"
    with subprocess.Popen(
        [sys.executable, "-c", USER, image],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as user:
        assert user.stdout is not None
        root = Path(user.stdout.readline().strip())
        assert root.parent.parent == temporary and (root / "usr/file").exists()
        remove_ownerless(temporary)
        assert (root / "usr/file").exists()
        user.kill()
    assert (root / "usr/file").exists()
    remove_ownerless(temporary)
    assert nothing_is_left(image)


@pytest.mark.parametrize("planted", ["open to all", "a link", "a file", "another user's"])
def test_an_image_whose_name_another_user_took_is_unpacked_elsewhere(image: Path, planted: str) -> None:
    with root_of(image) as root:
        name = root.parent
    if planted == "a link":
        name.symlink_to(image.parent)
    elif planted == "a file":
        name.touch()
    else:
        name.mkdir(mode=0o700)
        if planted == "open to all":
            name.chmod(0o777)
        elif os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        else:
            os.chown(name, 65534, 65534)
    with root_of(image) as root:
        assert root.parent != name and (root / "usr/file").read_text() == "whole\n"
    assert [*(image.parent / "temporary").iterdir()] == [name]
