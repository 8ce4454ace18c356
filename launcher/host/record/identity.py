"""Identity of a run: which run a directory is, which jobs are its own, its token, and its entry in the user's index.

A run has an id (run.json), which its jobs carry in their comment. A copy of its directory has the same id but is
another run: the job recorded there is the original's. A directory that was moved, or is reached by a link or another
mount, is still the same run. A moved directory leaves nothing behind and keeps its inode; a link leads to the same
run.json, with the same inode and change time, which no copy shares. A directory that moved to another file system looks
like a copy and counts as one: no job is ended for it, and starting it makes it a separate run.
"""

from __future__ import annotations

import os
import re
import secrets
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import TRACKERS, RunDir
from megatron_rl.contract.records import append, if_readable, read, read_or_raise, write
from megatron_rl.contract.run_records import Owner, RunIdentity, Submission

SUBMITTED_S = 3600.0  # seconds that the clocks of two hosts may differ
TOKEN_BYTES = 32  # random bytes of a token

_TOKEN = re.compile(r"[A-Za-z0-9_-]{32,}\n")
_MARK = re.compile(r"\bmrl:([0-9a-f]{32})\b")


def copied_from(run: RunDir, identity: RunIdentity) -> str | None:
    """Directory that this one is a copy of; None where it is the run's own. Raises OSError."""
    if os.path.abspath(run.root) == identity.path:
        return None
    # The record names /lustre/a; this directory is /lustre/b. If both lead to one run.json (inode and change time), b
    # is a link to a, or another mount of it. If a is gone, or holds another run, and b has the recorded inode, b is a
    # that was moved. Otherwise b was copied. Where a cannot be looked at, it may still run there, so b counts as a
    # copy.
    original = RunDir(identity.path)
    try:
        theirs, ours = original.identity.stat(), run.identity.stat()
        if (theirs.st_ino, theirs.st_ctime_ns) == (ours.st_ino, ours.st_ctime_ns):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass  # the original was moved or removed
    except PermissionError:
        return identity.path
    there = if_readable(read(RunIdentity, original.identity))
    moved = run.root.stat().st_ino == identity.inode and (there is None or there.id != identity.id)
    return None if moved else identity.path


def identify(run: RunDir) -> RunIdentity:
    """Return the identity of a run that is about to start, whose lock the caller holds. A directory without one gets
    it. So does a copy, and its records of the original's job and of trackers' runs are removed. Raises OSError."""
    identity = read_or_raise(RunIdentity, run.identity)
    path, by = os.path.abspath(run.root), os.environ.get("USER", "")
    inode = run.root.stat().st_ino
    if identity is not None and copied_from(run, identity) is None:
        if (identity.path, identity.inode) != (path, inode):
            identity = identity._replace(path=path, inode=inode)
            write(run.identity, identity)
        return identity
    if identity is not None:
        for file in (run.job, *map(run.tracker, TRACKERS)):
            file.unlink(missing_ok=True)
    identity = RunIdentity(uuid.uuid4().hex, path, inode, time.time(), by)
    write(run.identity, identity)
    return identity


def comment_of(run_id: str, given: str = "") -> str:
    return f"{given} mrl:{run_id}".strip()


def is_job_of(owner: Owner, comment: str, name: str, submitted_at: float | None, restarts: int) -> bool:
    """Whether the job that now has a recorded id is the recorded job, and not a later one with a reused id. Its comment
    decides. Where that names no run, because sbatch was called by hand or the site sets its own comments, it is another
    job if both its name and its time of submission (which a requeue changes) differ."""
    marked = _MARK.search(comment)
    if marked and owner.run_id:
        return marked.group(1) == owner.run_id
    renamed = bool(owner.name) and name != owner.name
    later = submitted_at is not None and restarts == 0 and abs(submitted_at - owner.submitted_at) > SUBMITTED_S
    return not (renamed and later)


def make_token(run: RunDir) -> None:
    """Create the token that a run's listeners know its other processes by, readable by its owner only. A whole and
    private token stays. Call it before any rank starts, since ranks read it once. Raises OSError."""
    try:
        private = run.token.stat().st_mode & 0o077 == 0
        if private and _TOKEN.fullmatch(run.token.read_text(encoding="ascii", errors="replace")):
            return
    except FileNotFoundError:
        pass
    write_atomic(run.token, secrets.token_urlsafe(TOKEN_BYTES) + "\n", private=True)


def index_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Index of the runs that this account submitted. It only helps to find them, and may be deleted."""
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".local" / "state")
    return Path(home) / "mrl" / "runs.jsonl"


def note_submission(run: RunDir, cluster: str, job_id: str | None) -> str | None:
    line = Submission(os.path.abspath(run.root), cluster, time.time(), job_id)
    try:
        index_file().parent.mkdir(parents=True, exist_ok=True)
        append(index_file(), line)
    except OSError as error:
        return f"{index_file()}: {error.strerror}; mrl finds this run by its path only"
    return None
