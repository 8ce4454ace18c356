"""Software of this login node for containers and the host side: pyxis, enroot's credentials, a python3."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.backends.probe.command import Fact, ask

PYTHON_PROBE = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
_DEPTH = 5  # of plug-in configurations that include others


@dataclass(frozen=True, slots=True)
class Software:
    """Software of this machine that matters to a run."""

    host_python: Fact
    """Version of the first of the profile's `host_pythons`, such as 3.9.21."""
    pyxis: str | None
    """Version, read from the plug-in that this machine's srun loads; None: not found."""
    registries: frozenset[str] | None
    """Registries that enroot has credentials for; the credentials themselves are never kept. None: no such file."""
    credentials: Path
    """enroot's file of credentials."""
    exposed: bool
    """Whether other users may read that file."""


def inspect(host_python: str, plugstack: Path | None) -> Software:
    """Inspect this machine.

    Args:
        host_python: interpreter of the host side.
        plugstack: Slurm's PlugStackConfig.
    """
    credentials = credentials_path()
    found, exposed = _registries(credentials)
    return Software(
        host_python=ask([host_python, "-c", PYTHON_PROBE]),
        pyxis=pyxis_version(plugstack) if plugstack else None,
        registries=found,
        credentials=credentials,
        exposed=exposed,
    )


def credentials_path() -> Path:
    """enroot's netrc-like file; `ENROOT_CONFIG_PATH` of this shell, or enroot's default."""
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(os.environ.get("ENROOT_CONFIG_PATH") or Path(config) / "enroot") / ".credentials"


def pyxis_version(plugstack: Path) -> str | None:
    """Version of pyxis, read from the plug-in that Slurm's plug-in configuration names."""
    for library in _plugins(plugstack, _DEPTH):
        try:
            found = re.search(rb"pyxis: version v([0-9.]+)", library.read_bytes())
        except OSError:
            continue
        if found:
            return found[1].decode("ascii").rstrip(".")
    return None


def _plugins(config: Path, depth: int) -> list[Path]:
    try:
        lines = [
            line.split("#")[0].split() for line in config.read_text(encoding="utf-8", errors="replace").splitlines()
        ]
    except OSError:
        return []
    found: list[Path] = []
    for fields in lines:
        if len(fields) > 1 and fields[0] == "include" and depth:
            base, pattern = _anchored(config.parent, fields[1])
            for included in sorted(base.glob(pattern)):
                found += _plugins(included, depth - 1)
        elif len(fields) > 1 and fields[0] in ("required", "optional"):
            found.append(Path(fields[1]))
    return found


def _anchored(folder: Path, pattern: str) -> tuple[Path, str]:
    return (Path("/"), pattern.lstrip("/")) if pattern.startswith("/") else (folder, pattern)


def _registries(credentials: Path) -> tuple[frozenset[str] | None, bool]:
    """Return (registries, whether other users may read the file)."""
    try:
        with credentials.open(encoding="utf-8", errors="replace") as file:
            tokens, mode = file.read().split(), os.fstat(file.fileno()).st_mode
    except OSError:
        return None, False
    return frozenset(name for key, name in pairwise(tokens) if key == "machine"), bool(mode & 0o077)
