"""Files are complete or absent, however many nodes write, and a temporarily full disk is waited for."""

from __future__ import annotations

import errno
import io
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contract import files, records
from megatron_rl.contract.files import PASSING, append_line, names_in, until_written, write_atomic
from megatron_rl.contract.owned_folders import prefix_of
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.run_records import Done


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


def test_only_an_error_that_passes_is_waited_for(monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    errors = [OSError(number, os.strerror(number)) for number in PASSING]

    def write() -> str:
        if errors:
            raise errors.pop()
        return "written"

    assert until_written("f", write) == "written"
    errors.append(OSError(errno.EACCES, "Permission denied"))
    with pytest.raises(OSError, match="Permission denied: 'f'"):
        until_written("f", write)


class FailingFile(io.FileIO):
    """A file on a mount that takes five bytes and then fails, a few times."""

    fails: list[int] = []

    def write(self, data: Any) -> int:
        if not self.fails:
            return super().write(data)
        if len(data) > 5 and self.tell() % 2:  # not at once
            return super().write(data[:5])
        super().write(data[:5])
        raise OSError(self.fails.pop(), "failed")


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("restores", [True, False])
def test_a_line_whose_write_failed_for_a_moment_is_neither_doubled_nor_torn(tmp_path, monkeypatch, number, restores):
    path, line = tmp_path / "metrics.jsonl", json.dumps({"step": 2, "loss": 0.5})
    path.write_text('{"step": 1}\n')
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files.Path, "open", lambda path, mode, buffering: FailingFile(path, mode.replace("b", "")))
    monkeypatch.setattr(FailingFile, "fails", [number] * 3)
    if not restores:
        monkeypatch.setattr(files.os, "truncate", lambda path, end: (_ for _ in ()).throw(OSError(number, "failed")))
    append_line(path, line, patience=30.0)
    append_line(path, line)
    monkeypatch.undo()
    assert path.read_text() == f'{{"step": 1}}\n{line}\n{line}\n'


def test_a_line_that_reached_the_disk_although_the_flush_failed_is_not_doubled(tmp_path, monkeypatch):
    path, fails = tmp_path / "ledger.jsonl", [errno.EIO, errno.ESTALE]
    path.write_text("torn")

    def fsync(descriptor: int) -> None:
        if fails:
            raise OSError(fails.pop(), "failed")

    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files.os, "fsync", fsync)
    monkeypatch.setattr(files.os, "truncate", lambda path, end: (_ for _ in ()).throw(OSError(errno.EIO, "failed")))
    append_line(path, "whole", durable=True, patience=30.0)
    assert path.read_text() == "torn\nwhole\n"


def test_the_error_of_a_record_that_cannot_be_written_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "failed")))
    for write_it in (records.write, partial(records.append, durable=True)):
        with pytest.raises(OSError, match=r"failed: '.*/done\.json'"):
            write_it(tmp_path / "done.json", Done(1, 2, 3.0))


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
        until_written("f", write, patience=2.5)
    assert sum(slept) == 2.5
    with pytest.raises(OSError, match="full"):
        until_written("f", write, patience=0.0)
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
    assert Path(found).name.startswith(prefix_of("compiled"))  # which is removed after this process
    if not folder.is_symlink():
        os.chown(folder, os.getuid(), os.getgid())
    folder.unlink() if folder.is_symlink() else folder.rmdir()
    assert files.compiler_cache() == str(folder) == files.compiler_cache()
