"""A run has one owner at a time, which others can identify; also where the file system has no locks."""

from __future__ import annotations

import errno
import fcntl
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.host.process.lock import IsLocked, Lock, RunIsOwned, RunLock, owner_of
from megatron_rl.contract.records import encode_line
from megatron_rl.contract.run_records import LockOwner


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_the_owner_is_named_to_the_next_one(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "lock", "the supervisor")
    owner = owner_of(tmp_path / "lock")
    assert owner is not None and owner.what == "the supervisor"
    with pytest.raises(RunIsOwned, match="in use by the supervisor"):
        RunLock(tmp_path / "lock", "another one")
    lock.release()
    assert owner_of(tmp_path / "lock") is None


@contextmanager
def _living(pass_fds: Sequence[int] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, however that ends."""
    with subprocess.Popen(["sleep", "60"], pass_fds=pass_fds) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_an_owner_whose_words_cannot_be_read_owns_it_all_the_same(tmp_path: Path, content: str) -> None:
    lock = RunLock(tmp_path / "lock", "the supervisor")
    (tmp_path / "lock").write_text(content)
    assert owner_of(tmp_path / "lock") is not None
    with pytest.raises(RunIsOwned, match="another process"):
        RunLock(tmp_path / "lock", "another one")
    lock.release()


def test_what_inherits_the_lock_holds_it(tmp_path: Path) -> None:
    lock = Lock(tmp_path / "lock")
    with _living(pass_fds=[lock.descriptor]):
        lock.release()
        with pytest.raises(IsLocked):
            Lock(tmp_path / "lock")
    Lock(tmp_path / "lock").release()


def test_without_locks_a_run_can_be_had_and_it_is_said(tmp_path: Path, no_locks: None) -> None:
    lock = RunLock(tmp_path / "lock", "the supervisor")
    assert not lock.works
    lock.release()
    assert owner_of(tmp_path / "lock") is None


def test_without_locks_an_owner_is_one_as_long_as_its_process_lives(tmp_path: Path, no_locks: None) -> None:
    with _living() as child:
        owner = LockOwner("the supervisor", child.pid, socket.gethostname(), "today")
        (tmp_path / "lock").write_text(encode_line(owner) + "\n")
        assert owner_of(tmp_path / "lock") == owner
        with pytest.raises(RunIsOwned, match="in use by the supervisor"):
            RunLock(tmp_path / "lock", "another one")
    assert owner_of(tmp_path / "lock") is None
