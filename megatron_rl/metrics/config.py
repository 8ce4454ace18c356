"""Recipe keys of the record: samples, histograms, Weights & Biases."""

from __future__ import annotations

from typing import Literal

from megatron_rl.section import NonNegativeInt, PositiveInt, Section


class WandbConfig(Section):
    """The record, shown by Weights & Biases: one W&B run for a run, however often it starts. Needs the extra
    `wandb` of mrl where the ranks run, and WANDB_API_KEY there (the cluster profile's `secrets`)."""

    project: str
    entity: str | None = None
    """Team or account that has the project; default: that of the key."""
    group: str | None = None
    """Runs of a project that are shown together."""
    tags: list[str] = []
    mode: Literal["online", "offline"] = "online"
    """offline: only written, to the run directory's `wandb`, for nodes without internet; `wandb sync` sends it."""


class LoggingConfig(Section):
    samples_every: NonNegativeInt = 10
    """Steps between sample rollouts written as text; 0 writes none."""
    samples: PositiveInt = 4
    """Rollouts written each time."""
    histograms_every: NonNegativeInt = 50
    """Steps between TensorBoard histograms; 0 writes none."""
    wandb: WandbConfig | None = None
    """Default: no Weights & Biases."""
