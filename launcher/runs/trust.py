"""Whose run a directory is: to go on with it is to run what is in it."""

from __future__ import annotations

import os
from pwd import getpwuid

from launcher.errors import BadInput
from launcher.runs.find import is_run
from megatron_rl.contract.paths import RunDir

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
