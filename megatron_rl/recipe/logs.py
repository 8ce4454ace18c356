"""Recipe keys of logging and notifications: samples, trackers, commands and webhooks."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.contract.paths import TRACKERS
from megatron_rl.recipe.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from megatron_rl.recipe.trackers import MlflowConfig, TrackioConfig, WandbConfig


class LoggingConfig(Section):
    """Samples and experiment trackers. TensorBoard is always written. No tracker can stop a run or slow it down."""

    samples_every: NonNegativeInt = 10
    """Steps between groups that are recorded with all their tokens (`mrl rollouts`), beside those of the first and the
    last step; 0 records none. Rewards and lengths are recorded of every group."""
    samples: PositiveInt = 4
    """Groups recorded with their tokens each time."""
    wandb: WandbConfig | None = None
    """Weights & Biases; default: off."""
    mlflow: MlflowConfig | None = None
    """MLflow; default: off."""
    trackio: TrackioConfig | None = None
    """trackio; default: off."""

    @property
    def trackers(self) -> list[str]:
        """Names of the trackers that the recipe asks for, beside TensorBoard."""
        return [name for name in TRACKERS if getattr(self, name) is not None]


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps, 0 for never, happens after this step."""
    return every > 0 and (step == 1 or step % every == 0)


Event = Literal["finished", "held", "restarted", "stalled", "reward-collapse", "warning"]


class NotifyConfig(Section):
    """Notifications of a run's events, each at most once. They never end a run, and delay the end of a job by ten
    seconds at most. The process that watches the run sends them: on Slurm that of the batch host, outside of the
    container."""

    on: Annotated[list[Event], Field(min_length=1)] = ["finished", "held", "stalled", "reward-collapse"]
    """finished. held: the run has failed, and waits for you. restarted: an attempt has ended (preemption, crash, dead
    node), and the run starts again by itself. stalled: no new step for `stalled_s`. reward-collapse: the mean reward
    has lost half of its rise, or all answers earn the same. warning: any warning of the run begins."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Words of a command. It finds MRL_EVENT, MRL_TEXT, MRL_RUN, MRL_RUN_DIR and MRL_ATTEMPT in its environment, and is
    killed after 30 s. With a shell: [sh, -c, 'echo "$MRL_TEXT" | mail -s "$MRL_RUN" me@example.org']."""
    webhook: str | None = None
    """Name of an environment variable, or path (/... or ~/...) of a file, with the URL that gets a POST with the JSON
    object {text, content, event, run, run_dir, attempt}. Slack, Mattermost and Discord show such messages. The URL is
    a secret, so it does not stand here; on Slurm list a variable under `secrets` of the cluster profile."""
    stalled_s: PositiveFloat = 1800.0
    """Seconds without a new step, start-up and evaluations included, after which a run counts as stalled; should exceed
    the longest of these. `job.silence_limit_s` ends a run that hangs."""

    @field_validator("webhook", mode="before")
    @classmethod
    def _is_no_url(cls, value: object) -> object:
        """Runs before validation, whose messages would show the value."""
        if value is not None and not (
            isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*|(/|~/)[^\x00-\x1f]+", value)
        ):
            raise ValueError(
                "must be the name of an environment variable, or the path of a file that starts with / or ~/; the URL "
                "itself is a secret, and others can read recipes: put it into that variable or file"
            )
        return value

    @model_validator(mode="after")
    def _sends_something(self) -> NotifyConfig:
        if self.command is None and self.webhook is None:
            raise ValueError("needs command or webhook, or both; set notify to null for no notifications")
        return self
