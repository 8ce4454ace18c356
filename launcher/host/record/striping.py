"""The folder of the checkpoints, on Lustre with its large files spread over several storage servers.

A rank writes one file of many gigabytes, which by Lustre's own default lies on one server whole. Only the batch host
and the login node have `lfs`, containers have not, so the folder is made before the ranks start.
"""

from __future__ import annotations

import subprocess

from megatron_rl.contract.paths import RunDir

LIMIT_S = 10.0  # that lfs may take
UNSTRIPED = "1"  # stripes of a folder that nobody, the site least of all, has laid out
# By https://wiki.lustre.org/Lustre_Striping_Best_Practices: a file below a gigabyte stays on one server, a larger one
# that a single client writes is spread over four to eight.
LAYOUT = ("--component-end", "1G", "--stripe-count", "1", "--component-end", "-1", "--stripe-count", "4")


def make_checkpoints(run: RunDir) -> None:
    """Make the folder of the checkpoints, where there is none yet. Nothing of it is ever an error: a rank that finds no
    folder makes one, and says why where it cannot."""
    try:
        run.checkpoints.mkdir(parents=True)
    except OSError:
        return
    stripes = _lfs("getstripe", "--directory", "--stripe-count", str(run.checkpoints))
    if stripes is not None and stripes.strip() == UNSTRIPED:
        _lfs("setstripe", *LAYOUT, str(run.checkpoints))


def _lfs(*arguments: str) -> str | None:
    """What lfs prints; None where there is none, the file system is no Lustre, or it does not answer."""
    try:
        done = subprocess.run(
            ("lfs", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
