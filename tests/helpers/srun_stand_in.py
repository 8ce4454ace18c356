"""A program in place of srun, and an image for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def on_a_node(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Path:
    """Put a shell program in the place of srun, and return an image whose header is complete."""
    srun, image = folder / "srun", folder / "image.sqsh"
    srun.write_text(f"#!/bin/sh\n{program}\n")
    srun.chmod(0o755)
    image.write_bytes(b"hsqs".ljust(96, b"\0"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return image
