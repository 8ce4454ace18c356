"""The stand-in for pyxis, and images for it."""

from __future__ import annotations

import subprocess
from pathlib import Path


def compile_stand_in(target: Path) -> None:
    source = Path(__file__).with_name("pyxis_stand_in.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-o", target, source], check=True)


def make_image(file: Path, **environment: str) -> None:
    """A container image as the stand-in for pyxis takes it: a squashfs file's header, then the image's environment."""
    superblock = b"hsqs".ljust(48, b"\0")  # says that it needs 0 bytes, so it is not cut short
    lines = "".join(f"{name}={value}\n" for name, value in environment.items())
    file.write_bytes(superblock + b"\n" + lines.encode())
