"""Reasons why notifications could not work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from launcher.cluster.profile import Profile
from megatron_rl.recipe.logs import NotifyConfig


def refusals(config: NotifyConfig | None, environ: Mapping[str, str] | None) -> list[str]:
    """Return reasons why nothing could be sent. `environ`: environment of the process that sends, of a run on this
    machine; None on Slurm, where it is another one."""
    found: list[str] = []
    if config is None:
        return found
    webhook, command = config.webhook, config.command
    if webhook and "/" in webhook and not os.access(Path(webhook).expanduser(), os.R_OK):
        found.append(
            f"notify.webhook: {webhook} does not exist, or you may not read it; put the URL into it (chmod 600)"
        )
    if webhook and "/" not in webhook and environ is not None and not environ.get(webhook):
        found.append(f"notify.webhook: the variable {webhook} is not set here; export it, or name a file with the URL")
    if command and environ is not None and shutil.which(command[0], path=environ.get("PATH")) is None:
        found.append(f"notify.command: {command[0]} is not an executable file on this machine")
    return found


def notes(config: NotifyConfig | None, profile: Profile, cluster: str) -> list[str]:
    webhook = config.webhook if config else None
    if not webhook or "/" in webhook or webhook in profile.secrets:
        return []
    return [
        f"notify.webhook: {webhook} is not among the secrets of {cluster}: the job has no such variable, unless the "
        "nodes set it"
    ]
