"""A root file system with the interpreter of the tests, a shell, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_rl.agent.sandbox.container import ContainerLimits, ProgramContainer, why_not_contained

LEFT_OUT = (
    "site-packages",
    "test",
    "idlelib",
    "tkinter",
    "ensurepip",
    "lib2to3",
    "turtledemo",
    "__pycache__",
    "config-*",
)
PYTHON = os.path.realpath(sys.executable)


def make_small_root(root: Path) -> Path:
    """Make it out of copies, or links, of this machine's files, at their own paths. Skips the test where the kernel
    allows no containers."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    extensions = [*map(str, (stdlib / "lib-dynload").glob("*.so"))]
    listed = subprocess.run(["ldd", PYTHON, "/bin/sh", *extensions], capture_output=True, text=True, check=True).stdout
    libraries = {word for word in listed.split() if word.startswith("/") and not word.endswith(":")}
    for file in {PYTHON, os.path.realpath("/bin/sh"), *libraries}:
        _take(file, root / file.lstrip("/"))
    if not (shell := root / "bin/sh").exists():
        shell.parent.mkdir(parents=True, exist_ok=True)
        shell.symlink_to(os.path.realpath("/bin/sh"))
    (root / "usr/bin").mkdir(parents=True, exist_ok=True)
    (root / "usr/bin/python3").symlink_to(PYTHON)
    target = root / str(stdlib).lstrip("/")
    shutil.copytree(stdlib, target, ignore=shutil.ignore_patterns(*LEFT_OUT), copy_function=_take, dirs_exist_ok=True)
    (root / "etc").mkdir()
    (root / "etc/environment").write_text(f"PATH={Path(PYTHON).parent}:/usr/bin:/bin\nOF_IMAGE='two words'\n")
    with TemporaryDirectory() as empty:
        container = ProgramContainer(str(root), ContainerLimits(2**26, 2**24, 8), network=False)
        if why := why_not_contained(container, Path(empty)):
            pytest.skip(f"no containers here: {why}")
    return root


def _take(source: str, target: str | Path) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(os.path.realpath(source), target)
    except OSError:  # another file system, or the file of another user
        shutil.copy2(source, target)
