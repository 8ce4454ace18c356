"""What the tests of the bank share: lineages, entries without a file, and a bank that nothing was left in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from megatron_rl.rollout.bank.bank import Bank
from megatron_rl.rollout.bank.file import Entry
from megatron_rl.rollout.bank.records import Lineage
from megatron_rl.rollout.config import ResumeConfig
from megatron_rl.rollout.driver import RolloutDriver
from megatron_rl.run import Run

NOWHERE = Path("nowhere.bank")


def lineage(attempt: int, policy_version: int = 0, recipe: str = "r") -> Lineage:
    """Of an attempt that went on from the checkpoint with that policy version."""
    return Lineage("run", attempt, policy_version, policy_version, recipe)


def entry(head: dict[str, Any], size: int = 100) -> Entry:
    return Entry(NOWHERE, 0, 0, size, 0, head)


def bank_in(
    folder: Path, attempt: int = 1, resume: ResumeConfig | None = None, policy_version: int = 0, **where: int
) -> Bank:
    """The bank of an attempt's only driver, unless `where` says otherwise, that goes on from a checkpoint of the given
    policy version, or from nothing."""
    place = {"next_ordinal": 0, "driver": 0, "drivers": 1} | where
    return Bank(folder, resume or ResumeConfig(), lineage(attempt, policy_version), **place)


def drive(run: Run, bank: Bank) -> None:
    """Give a run a driver with this bank, as if it had been built with it."""
    run.driver.close()
    run.driver = RolloutDriver(
        run.environment, run.engine, bank, run.config, run.groups, run.safe_points, asyncio.Runner()
    )
