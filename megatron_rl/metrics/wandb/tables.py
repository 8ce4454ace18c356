"""Sampled groups of a run as tables of W&B."""

from __future__ import annotations

import time
from typing import Any

from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import GroupLine, read_rollouts
from megatron_rl.metrics.config import is_due

TABLE = ("step", "ordinal", "environment", "prompt", "answer", "reward", "advantage", "tokens", "finish_reason")
"""Columns of a table of rollouts."""
PATIENCE_S = 30.0  # seconds that a step waits for its groups


class RolloutTables:
    """Tables of the sampled groups of a run. A rank writes its groups up to ten seconds after the metrics of their
    step, and W&B takes the values of a step only once, so a sampled step waits for them, at most PATIENCE_S."""

    def __init__(self, run: RunDir, config: RunConfig) -> None:
        self._run, self._every = run, config.logging.samples_every
        self._groups = min(config.logging.samples, config.groups_per_step)
        self._since: dict[int, float] = {}

    def ready(self, step: int, complete: bool) -> bool:
        """Whether the values of a step can be sent.

        complete: whether nothing more will be written.
        """
        if complete or step == 0 or not is_due(step, self._every):
            return True
        waits = time.monotonic() - self._since.setdefault(step, time.monotonic())
        return waits > PATIENCE_S or len(self._sampled(step)) >= self._groups

    def of(self, step: int) -> dict[str, Any]:
        """Return the table of a step by its name; empty for a step without one."""
        import wandb

        if step == 0 or not is_due(step, self._every):
            return {}
        rows = [
            [step, group.ordinal, group.environment, group.prompt, answer.text, reward, advantage, tokens, reason]
            for group in self._sampled(step)
            for answer, reward, advantage, tokens, reason in zip(*_columns(group), strict=True)
        ]
        return {"rollouts": wandb.Table(columns=list(TABLE), data=rows)} if rows else {}

    def _sampled(self, step: int) -> list[GroupLine]:
        return [group for group in read_rollouts(self._run, step, step) if group.answers]


def _columns(group: GroupLine) -> tuple[Any, ...]:
    return group.answers, group.rewards, group.advantages, group.lengths, group.finish_reasons
