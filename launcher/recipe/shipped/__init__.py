"""Recipes that come with mrl, by name."""

from pathlib import Path

SHIPPED = Path(__file__).parent


def shipped_recipes() -> list[str]:
    """Names that can be used instead of a path."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))
