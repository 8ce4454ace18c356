"""What the tests of the bank share: lineages, entries without a file, and an engine and an agent that ask it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_rl.rollout.bank.file import Entry
from megatron_rl.rollout.bank.records import Lineage

NOWHERE = Path("nowhere.bank")


def line(attempt: int, policy_version: int = 0, recipe: str = "r") -> Lineage:
    """Of an attempt that went on from the checkpoint with that policy version."""
    return Lineage("run", attempt, policy_version, policy_version, recipe)


def entry(head: dict[str, Any], size: int = 100) -> Entry:
    return Entry(NOWHERE, 0, 0, size, 0, head)
