"""Small disks are filled and have room again, for all or on one node. Needs root and, for nodes, Slurm."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from full_disks import cover_on_node, fill, is_small, small_disk, use_up_inodes
from lab import Cluster, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")]


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with small_disk(Path(folder, "disk"), 16, 500) as mounted:
                yield mounted
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no disk can be mounted here: {getattr(error, 'stderr', None) or error}")


def refusal(file: Path, size: int) -> str | None:
    """Return the name of the error with which a file of this size cannot be written and flushed."""
    try:
        with file.open("wb") as written:
            written.write(bytes(size))
            written.flush()
            os.fsync(written.fileno())
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        file.unlink(missing_ok=True)
    return None


def test_full_disk_takes_nothing_until_it_is_emptied(disk: Path) -> None:
    undo = fill(disk)
    assert refusal(disk / "file", 5000) == "ENOSPC"
    undo()
    assert refusal(disk / "file", 5000) is None


def test_nearly_full_disk_takes_small_files_alone(disk: Path) -> None:
    undo = fill(disk, 100_000)
    assert (refusal(disk / "file", 10_000), refusal(disk / "file", 1_000_000)) == (None, "ENOSPC")
    undo()
    assert refusal(disk / "file", 1_000_000) is None


def test_disk_without_inodes_takes_no_new_file(disk: Path) -> None:
    (old := disk / "old").write_text("x")
    undo = use_up_inodes(disk)
    old.write_text("changed")
    assert refusal(disk / "file", 1) == "ENOSPC"
    undo()
    assert refusal(disk / "file", 1) is None


def test_disk_of_the_machine_is_never_filled() -> None:
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        if is_small(Path(folder)):
            pytest.skip("the machine's own disk is small")
        with pytest.raises(AssertionError, match="large disk"):
            fill(Path(folder))


def test_disk_is_full_on_one_node_alone(tmp_path: Path) -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    lab = Cluster(nodes=2)

    def written(node: str) -> bool:
        return "yes" in lab.run(
            "srun", f"--nodelist={node}", "sh", "-c", f'echo x >"{tmp_path}/$$" && echo yes', check=False
        )

    try:
        lab.up()
        undo = cover_on_node(lab, "node01", tmp_path)
        assert (written("node01"), written("node02")) == (False, True)
        undo()
        assert written("node01")
    finally:
        lab.down()
