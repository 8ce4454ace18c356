"""Software of this login node for containers and the host side: enroot's credentials, a python3."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.backends.probe.command import Fact, ask

PYTHON_PROBE = "import sys; print('.'.join(map(str, sys.version_info[:3])))"


@dataclass(frozen=True, slots=True)
class Software:
    host_python: Fact
    """Version of the first of the profile's `host_pythons`, such as 3.9.21."""
    registries: frozenset[str] | None
    """Registries that enroot has credentials for; the credentials themselves are never kept. None: no such file."""
    credentials: Path
    """enroot's file of credentials."""
    exposed: bool


def inspect(host_python: str) -> Software:
    """Inspect this machine.

    Args:
        host_python: interpreter of the host side.
    """
    credentials = credentials_path()
    found, exposed = _registries(credentials)
    return Software(
        host_python=ask([host_python, "-c", PYTHON_PROBE]),
        registries=found,
        credentials=credentials,
        exposed=exposed,
    )


def credentials_path() -> Path:
    """enroot's netrc-like file; `ENROOT_CONFIG_PATH` of this shell, or enroot's default."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("ENROOT_CONFIG_PATH") or Path(config) / "enroot") / ".credentials"


def _registries(credentials: Path) -> tuple[frozenset[str] | None, bool]:
    try:
        with credentials.open(encoding="utf-8", errors="replace") as file:
            tokens, mode = file.read().split(), os.fstat(file.fileno()).st_mode
    except OSError:
        return None, False
    return frozenset(name for key, name in pairwise(tokens) if key == "machine"), bool(mode & 0o077)
