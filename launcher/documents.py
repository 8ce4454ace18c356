"""Folder of the pages and scripts that messages name: docs/ and containers/."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.recipe.extras import OURS, installed

ROOT = Path(__file__).parents[1]
"""The clone, or the directory that mrl is installed into."""
IN_A_WHEEL = ("share", "mrl")
"""Folder that a wheel puts both into, below the root of the environment."""


def documents() -> Path | None:
    """Return the clone or, for an installed wheel, its folder in the environment; None if neither is complete."""
    if (ROOT / "docs" / "slurm.md").is_file() and (ROOT / "containers" / "README.md").is_file():
        return ROOT
    ours = installed(OURS)
    for file in (ours.files if ours else None) or ():
        if file.name == "README.md" and file.parts[-4:-1] == (*IN_A_WHEEL, "containers"):
            found = Path(str(file.locate())).resolve().parents[1]
            return found if found.is_dir() else None
    return None
