"""The folder of the checkpoints, with large files spread over several storage servers on Lustre.

A rank writes one file of many gigabytes, which Lustre by default stores on one server. Only the batch host and the
login node have `lfs`, containers do not, so the folder is created before the ranks start."""

from __future__ import annotations

import subprocess

from launcher.host.process.limited import run_limited
from megatron_rl.contract.paths import RunDir

LIMIT_S = 10.0  # seconds for lfs
UNSTRIPED = "1"  # stripe count of a folder without a layout of the site's
# https://wiki.lustre.org/Lustre_Striping_Best_Practices: files below a gigabyte on one server, larger ones that a
# single client writes on four to eight.
LAYOUT = ("--component-end", "1G", "--stripe-count", "1", "--component-end", "-1", "--stripe-count", "4")


def make_checkpoints(run: RunDir) -> None:
    """Create the folder of the checkpoints if missing. Never raises: a rank creates it too, and reports why not."""
    try:
        run.checkpoints.mkdir(parents=True)
    except OSError:
        return
    stripes = _lfs("getstripe", "--directory", "--stripe-count", str(run.checkpoints))
    if stripes is not None and stripes.strip() == UNSTRIPED:
        _lfs("setstripe", *LAYOUT, str(run.checkpoints))


def _lfs(*arguments: str) -> str | None:
    try:
        done = run_limited(("lfs", *arguments), LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
