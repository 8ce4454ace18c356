"""Which run a directory is, and whether a job is that run's.

A run has an id (run.json), which its jobs carry in their comment. A copy of its directory has the same id and is
another run: the job on record there is the original's. A directory that was moved, or is reached by a link or another
mount, is the same run still. What tells them apart: a moved one left nothing behind where it was, and kept its inode; a
link leads to the very run.json, of the same inode and time of change, which no copy shares. Moved to another file
system it cannot be told from a copy and counts as one: nothing is ended for it, and starting it makes it a run.
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
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append, if_readable, read, read_or_raise, write
from megatron_rl.contract.run_records import Owner, RunIdentity, Submission

SUBMITTED_S = 3600.0  # by which the clocks of two hosts may differ

_MARK = re.compile(r"\bmrl:([0-9a-f]{32})\b")


def copied_from(run: RunDir, identity: RunIdentity) -> str | None:
    """The directory that this one is a copy of; None where it is the run's own.

    Args:
        identity: as the directory has it on record. Raises OSError.
    """
    if os.path.abspath(str(run.root)) == identity.path:
        return None
    original = RunDir(identity.path)
    try:
        theirs, ours = os.stat(str(original.identity)), os.stat(str(run.identity))
        if (theirs.st_ino, theirs.st_ctime_ns) == (ours.st_ino, ours.st_ctime_ns):
            return None
    except (FileNotFoundError, NotADirectoryError):
        pass  # it was moved away, or removed
    except PermissionError:
        return identity.path
    there = if_readable(read(RunIdentity, original.identity))
    moved = os.stat(str(run.root)).st_ino == identity.inode and (there is None or there.id != identity.id)
    return None if moved else identity.path


def identify(run: RunDir) -> RunIdentity:
    """The identity of a run that is about to be started, whose lock the caller holds. A directory without one gets it;
    so does a copy, and what it has of the original's, its job and its W&B run, is forgotten. Raises OSError."""
    identity = read_or_raise(RunIdentity, run.identity)
    path, by = os.path.abspath(str(run.root)), os.environ.get("USER", "")
    inode = os.stat(str(run.root)).st_ino
    if identity is not None and copied_from(run, identity) is None:
        if (identity.path, identity.inode) != (path, inode):
            identity = identity._replace(path=path, inode=inode)
            write(run.identity, identity)
        return identity
    if identity is not None:
        for file in (run.job, run.wandb):
            if file.exists():
                file.unlink()
    identity = RunIdentity(uuid.uuid4().hex, path, inode, time.time(), by)
    write(run.identity, identity)
    return identity


def comment_of(run_id: str, given: str = "") -> str:
    """The comment of a job of a run.

    Args:
        given: what the comment says beside.
    """
    return f"{given} mrl:{run_id}".strip()


def is_job_of(owner: Owner, comment: str, name: str, submitted_at: float | None, restarts: int) -> bool:
    """Whether a job that has the id on record is the one that is meant, and no later one under an id that was used
    again. Its comment tells. Where that names no run, because sbatch was called by hand or the site has comments of its
    own, it is another job if both its name and its time of submission, which a requeue changes, are other ones.

    Args:
        comment, name, submitted_at, restarts: of the job that has the id now.
    """
    marked = _MARK.search(comment)
    if marked and owner.run_id:
        return marked.group(1) == owner.run_id
    renamed = bool(owner.name) and name != owner.name
    later = submitted_at is not None and restarts == 0 and abs(submitted_at - owner.submitted_at) > SUBMITTED_S
    return not (renamed and later)


BYTES = 32  # of randomness

_WHOLE = re.compile(r"[A-Za-z0-9_-]{32,}\n")


def make_token(run: RunDir) -> None:
    """Have the run a token, for the eyes of its owner alone; one that is whole and that nobody else can read stays.
    Before any of its ranks starts: they read it once. Raises OSError."""
    try:
        private = run.token.stat().st_mode & 0o077 == 0
        if private and _WHOLE.fullmatch(run.token.read_text(encoding="ascii", errors="replace")):
            return
    except FileNotFoundError:
        pass
    write_atomic(run.token, secrets.token_urlsafe(BYTES) + "\n", private=True)


def index_file(environ: Mapping[str, str] = os.environ) -> Path:
    home = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or str(Path.home())) / ".local" / "state")
    return Path(home) / "mrl" / "runs.jsonl"


def note_submission(run: RunDir, cluster: str, job_id: str | None) -> str | None:
    """Add a submission; the reason where that was not possible, which stops no run."""
    line = Submission(os.path.abspath(str(run.root)), cluster, time.time(), job_id)
    try:
        index_file().parent.mkdir(parents=True, exist_ok=True)
        append(index_file(), line)
    except OSError as error:
        return f"{index_file()}: {error.strerror}; mrl finds this run by its path only"
    return None
