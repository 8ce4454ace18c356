"""Owner of a run: the Slurm job in the run's own record, and the user whose files it consists of."""

from __future__ import annotations

import os
from typing import NamedTuple

from launcher.backends.slurm.jobs import JobState, read_owners
from launcher.errors import BadInput
from launcher.host.record.identity import copied_from
from launcher.runs.find import is_run
from launcher.runs.writers import other_writers
from megatron_rl.contract.files import owner_name
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, read
from megatron_rl.contract.run_records import Owner, RunIdentity


class Copy(NamedTuple):
    original: str

    def __str__(self) -> str:
        return f"a copy of {self.original}, which is another run; mrl resume starts it as a separate run"


def recorded_owner(run: RunDir) -> Owner | Copy | Absent | Unreadable:
    identity = read(RunIdentity, run.identity)
    if isinstance(identity, Unreadable):
        return identity
    if identity is not ABSENT:
        try:
            original = copied_from(run, identity)
        except OSError as error:
            return Unreadable(str(error.filename or run.root), str(error.strerror))
        if original is not None:
            return Copy(original)
    return read(Owner, run.job)


def job_id_of(run: RunDir) -> str | None:
    """Id of the Slurm job that owns the run, or was the last to; None for a local run. Raises BadInput where job.json
    cannot be read, and for a copy of a run."""
    owner = _owner_or_refusal(run)
    return None if owner is None else owner.job_id


def read_job(run: RunDir) -> JobState | None:
    """State of the run's job; None for a run without one. Raises BadInput as `job_id_of`."""
    owner = _owner_or_refusal(run)
    return read_owners([owner])[0] if owner is not None else None


def _owner_or_refusal(run: RunDir) -> Owner | None:
    owner = recorded_owner(run)
    if isinstance(owner, Copy):
        raise BadInput(f"{run.root}: is {owner}")
    if isinstance(owner, Unreadable):
        raise BadInput(str(owner))
    return None if owner is ABSENT else owner


ROOT = 0  # user id; root could do anything without our help


def refuse_others(run: RunDir, trusted: bool) -> None:
    """Raise BadInput for a run of another user: to resume it means to run its snapshot of the code as oneself. Also for
    a directory in which all users, or its other owner, can replace it."""
    if trusted:
        return
    parts = (run.resolved, run.code, run.script, run.checkpoints) if is_run(str(run.root)) else ()
    for path in (run.root, *parts):
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BadInput(f"{path}: its owner is unknown: {error.strerror}; try again, or give --trust") from error
        writers = other_writers(found) if path == run.root else None
        if writers is not None:
            raise BadInput(
                f"{path}: {writers} can write there, and replace code and checkpoints that run as you: "
                f"chmod go-w {path}, or give --trust"
            )
        if found.st_uid not in (os.geteuid(), ROOT):
            raise BadInput(
                f"{path}: belongs to {owner_name(found.st_uid)}, and the code of that run would run as you: "
                "give --trust if you trust its author"
            )
