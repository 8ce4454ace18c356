"""The best evaluation of a supervised run, and when to stop because none is better. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from megatron_rl.recipe.training import EarlyStopConfig


class BestLoss(NamedTuple):
    """The evaluation with the lowest loss on held-out rows, as a checkpoint records it."""

    loss: float
    step: int
    since: int = 0  # evaluations after it


def best_after(best: BestLoss | None, loss: float, step: int, config: EarlyStopConfig) -> BestLoss | None:
    """Return the best evaluation after another one at `step`. A loss that is not finite is never better."""
    if math.isfinite(loss) and (best is None or loss < best.loss - config.improvement):
        return BestLoss(loss, step)
    return None if best is None else best._replace(since=best.since + 1)


def why_over(best: BestLoss | None, config: EarlyStopConfig | None) -> str:
    """Return why the run ends before its last step; empty if it does not."""
    if config is None or best is None or best.since < config.patience:
        return ""
    by = f" by {config.improvement:g}" if config.improvement else ""
    where = f"checkpoint step-{best.step:06d}" if best.step else "before the first step"
    return (
        f"the loss on held-out rows has not fallen{by} in {best.since} evaluations (training.early_stop); the best was "
        f"{best.loss:.4g} after step {best.step}: {where}"
    )
