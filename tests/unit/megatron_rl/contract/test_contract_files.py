"""Files are complete or absent, however many nodes write, and a temporarily full disk is waited for."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron_rl.contract import files
from megatron_rl.contract.files import names_in, once_there_is_room, write_atomic
from megatron_rl.contract.paths import RunDir


def test_two_nodes_with_equal_process_ids_may_write_one_file_concurrently(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    real = os.fsync

    def meanwhile_elsewhere(descriptor: int) -> None:
        monkeypatch.setattr(files.os, "fsync", real)
        write_atomic(path, "theirs")
        assert path.read_text() == "theirs"

    monkeypatch.setattr(files.os, "fsync", meanwhile_elsewhere)
    write_atomic(path, "ours")
    assert path.read_text() == "ours"
    assert list(tmp_path.iterdir()) == [path]


def test_new_file_is_flushed_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """Otherwise a power failure could leave an empty or partial file under the final name."""
    path = tmp_path / "job.json"
    write_atomic(path, "old")
    synced: list[tuple[str, str]] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        (temporary,) = (each for each in tmp_path.iterdir() if each != path)
        assert os.path.samestat(os.fstat(descriptor), temporary.stat())
        synced.append((path.read_text(), temporary.read_text()))
        real(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomic(path, "new")
    write_atomic(path, "newer", durable=False)
    assert synced == [("old", "new")]
    assert path.read_text() == "newer"


def test_failed_write_leaves_only_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "job.json"
    write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_only_a_full_disk_is_waited_for(monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    errors = [OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota")]

    def write() -> str:
        if errors:
            raise errors.pop()
        return "written"

    assert once_there_is_room("f", write) == "written"
    errors.append(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output"):
        once_there_is_room("f", write)


def test_wait_for_a_full_disk_ends_at_its_limit(monkeypatch):
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(files.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(files.time, "sleep", sleep)

    def write() -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        once_there_is_room("f", write, patience=2.5)
    assert sum(slept) == 2.5
    with pytest.raises(OSError, match="full"):
        once_there_is_room("f", write, patience=0.0)
    assert sum(slept) == 2.5


def test_missing_folder_is_empty_and_unlistable_folder_is_an_error(tmp_path, monkeypatch):
    assert names_in(tmp_path / "none") == []
    run = RunDir(tmp_path)
    assert (run.checkpoint_steps(), run.last_attempt(), run.attempt(1).errors()) == ([], 0, [])

    def refuse(path: str) -> list[str]:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files.os, "listdir", refuse)
    for look in (run.checkpoint_steps, run.last_attempt, run.attempt(1).errors):
        with pytest.raises(OSError, match="Input/output"):
            look()


def test_a_private_file_is_private_from_its_creation(tmp_path, monkeypatch):
    """Another user could open it before its mode is changed, and read what is written later."""

    def unchanged(*_: object) -> None:
        raise AssertionError("its mode was another one before")

    monkeypatch.setattr(os, "fchmod", unchanged)
    monkeypatch.setattr(os, "chmod", unchanged)
    before = os.umask(0)
    try:
        write_atomic(tmp_path / "token", "secret\n", private=True)
    finally:
        os.umask(before)
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("planted", ["open to all", "a link", "another user's"])
def test_compiled_code_is_loaded_from_no_folder_that_another_user_made(tmp_path, monkeypatch, planted):
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    folder, other = tmp_path / f"mrl-compiled-{os.getuid()}", tmp_path / "other"
    if planted == "a link":
        other.mkdir()
        folder.symlink_to(other)
    else:
        folder.mkdir()
        folder.chmod(0o777 if planted == "open to all" else 0o755)
        if planted == "another user's":
            if os.geteuid() != 0:
                pytest.skip("only root can give a folder to another user")
            os.chown(folder, 65534, 65534)
    found = files.compiler_cache()
    assert found not in (str(folder), str(other))
    assert Path(found).stat().st_mode & 0o777 == 0o700
    if not folder.is_symlink():
        os.chown(folder, os.getuid(), os.getgid())
    folder.unlink() if folder.is_symlink() else folder.rmdir()
    assert files.compiler_cache() == str(folder) == files.compiler_cache()
