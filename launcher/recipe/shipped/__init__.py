"""Recipes that come with mrl, by name, and the bases that they extend."""

from pathlib import Path

SHIPPED = Path(__file__).parent

BASES = SHIPPED / "bases"


def shipped_recipes() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def shipped_bases() -> list[str]:
    """Names that `extends` takes beside those of the recipes; a base alone is not a whole recipe."""
    return sorted(path.stem for path in BASES.glob("*.yaml"))
