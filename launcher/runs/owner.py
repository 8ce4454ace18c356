"""Which Slurm job owns a run, by the run's own record."""

from __future__ import annotations

import os
from pwd import getpwuid
from typing import NamedTuple

from launcher.backends.slurm.jobs import JobState, read_owners
from launcher.errors import BadInput
from launcher.host.record.identity import copied_from
from launcher.runs.find import is_run
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import ABSENT, Absent, Unreadable, read
from megatron_rl.contract.run_records import Owner, RunIdentity


class Copy(NamedTuple):
    """A directory is a copy of that of another run."""

    original: str

    def __str__(self) -> str:
        return f"a copy of {self.original}, which is another run; mrl resume starts it as a run of its own"


def recorded_owner(run: RunDir) -> Owner | Copy | Absent | Unreadable:
    """The Slurm job that owns the run, or was the last to; ABSENT for a local run."""
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
    """The Slurm job that owns the run, or was the last to; None for a local run. Raises BadInput where job.json cannot
    be read, and for a copy of a run."""
    owner = _owner_or_refusal(run)
    return None if owner is None else owner.job_id


def read_job(run: RunDir) -> JobState | None:
    """What Slurm says of the run's job; None for a run without one. Raises BadInput where it cannot be told which."""
    owner = _owner_or_refusal(run)
    return read_owners([owner])[0] if owner is not None else None


def _owner_or_refusal(run: RunDir) -> Owner | None:
    owner = recorded_owner(run)
    if isinstance(owner, Copy):
        raise BadInput(f"{run.root}: is {owner}")
    if isinstance(owner, Unreadable):
        raise BadInput(str(owner))
    return None if owner is ABSENT else owner


ROOT = 0  # could do what it likes anyway


def refuse_others(run: RunDir, trusted: bool) -> None:
    """Refuse a run of somebody else: parts of its checkpoints are unpickled, and its snapshot of the code is run, as
    the user who goes on with it.

    Args:
        trusted: the user has said --trust.

    Raises:
        BadInput: it, or a part of it that is run or unpickled, belongs to another user.
    """
    if trusted or not is_run(str(run.root)):
        return
    for path in (run.root, run.resolved, run.code, run.script, run.checkpoints):
        try:
            owner = path.stat().st_uid
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise BadInput(f"{path}: whose it is cannot be told: {error.strerror}; try again, or --trust it") from error
        if owner not in (os.geteuid(), ROOT):
            raise BadInput(
                f"{path}: belongs to {_name(owner)}; what is in that run would act as you: its code is run, and parts "
                "of its checkpoints are unpickled, which can run anything. Give --trust if you trust whoever wrote it"
            )


def _name(uid: int) -> str:
    try:
        return getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
