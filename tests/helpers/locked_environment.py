"""Virtual environments with a wheel of this clone, and packages at the versions and with the hashes of the locks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKS = ("cpu", "login", "smollm2")
"""Locks that have the packages of all extras of users except verifiers, each package at one version."""
CONSTRAINTS = ROOT / "containers" / "constraints-cpu.txt"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install")
LIMIT_S = 3000.0


def build(source: Path, target: Path, *only: str) -> None:
    """Build the wheel and the source distribution of a tree, or one of them (`--target wheel`)."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(target), *only],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=600,
    )


def environment(folder: Path, wheel: Path) -> Path:
    """Create a virtual environment with a wheel, without its dependencies, and return its Python."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    subprocess.run([str(python), *PIP, "--no-deps", "--no-index", str(wheel)], check=True, timeout=300)
    return python


def install_locked(python: Path, requirements: Iterable[str]) -> None:
    """Install what pip chooses for these requirements, from the locks; torch, which none has, by its constraint."""
    folder = python.parents[1]
    entries = _entries()
    pins = folder / "pins.txt"
    heads = [entry.partition("\n")[0].removesuffix(" \\") for found in entries.values() for entry in found]
    pins.write_text("\n".join(heads))
    report = folder / "chosen.json"
    asked = [str(python), *PIP, "--no-compile", "--constraint", str(CONSTRAINTS)]
    subprocess.run(
        [*asked, "--constraint", str(pins), "--dry-run", "--report", str(report), *requirements],
        check=True,
        timeout=LIMIT_S,
    )
    installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    chosen = {re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower() for one in installs}
    lock = folder / "lock.txt"
    lock.write_text("".join(entry for name in sorted(chosen) for entry in entries.get(name, ())))
    hashed = [str(python), *PIP, "--no-compile", "--no-deps", "--require-hashes", "--requirement", str(lock)]
    subprocess.run(hashed, check=True, timeout=LIMIT_S)
    if "torch" in chosen:
        subprocess.run([*asked, "torch"], check=True, timeout=LIMIT_S)


def _entries() -> dict[str, list[str]]:
    """Return the entries of each package with their hashes, as they stand in the locks, each once."""
    found: dict[str, list[str]] = {}
    for lock in LOCKS:
        text = (ROOT / "containers" / "locked" / f"{lock}.txt").read_text(encoding="utf-8")
        for name, rest in re.findall(r"^([a-z0-9-]+)(==[^\n]*\n(?:    --hash=[^\n]*\n)+)", text, re.MULTILINE):
            if f"{name}{rest}" not in found.setdefault(name, []):
                found[name].append(f"{name}{rest}")
    return found
