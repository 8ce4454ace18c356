"""Recipe keys of logging: samples, histograms, Weights & Biases."""

from __future__ import annotations

from typing import Literal

from megatron_rl.recipe.section import NonNegativeInt, PositiveInt, Section


class WandbConfig(Section):
    """Weights & Biases: one W&B run per run, however often the run starts. Needs the extra `wandb` of mrl where the
    ranks run, and WANDB_API_KEY there (`secrets` of the cluster profile)."""

    project: str
    """Project of W&B."""
    entity: str | None = None
    """Team or account that owns the project; default: that of the API key."""
    group: str | None = None
    """Group that shows this run together with others of the project."""
    tags: list[str] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """online: sent during the run. offline: only written to `wandb` of the run directory, for nodes without internet;
    `wandb sync` sends it later."""


class LoggingConfig(Section):
    """Samples, histograms and experiment trackers."""

    samples_every: NonNegativeInt = 10
    """Steps between groups that are recorded with all their tokens (`mrl rollouts`); 0 records none. Rewards and
    lengths are recorded of every group."""
    samples: PositiveInt = 4
    """Groups recorded with their tokens each time."""
    histograms_every: NonNegativeInt = 50
    """Steps between TensorBoard histograms; 0 writes none."""
    wandb: WandbConfig | None = None
    """Weights & Biases; default: off."""


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps, 0 for never, happens after this step."""
    return every > 0 and (step == 1 or step % every == 0)
