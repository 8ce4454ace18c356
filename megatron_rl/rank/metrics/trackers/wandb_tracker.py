"""Weights & Biases.

A run that resumes from a checkpoint repeats steps that W&B already has. But the history of a W&B run only grows: a
resumed W&B run drops steps up to its last one (docs.wandb.ai/models/support/seeing_fewer_data_points_logged); rewinding
it (`resume_from`) is a preview that self-hosted servers lack; and no documentation promises that a new run under an old
id replaces the history (github.com/wandb/wandb/issues/1450, 3424, 6216). So the W&B run is resumed, W&B reports its
last step, and the upload continues from there. W&B keeps the first value of a repeated step, metrics.jsonl the last;
they differ if `resume.partial` or the device permits it.

Offline there is nobody to ask. Every attempt then writes the whole record, in place of the previous one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.rank.metrics.trackers.record_rows import RecordRow
from megatron_rl.rank.metrics.trackers.tracker import TrackedRun, TrackerRefused

ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SHOW_INFO": "false"}  # no telemetry; errors alone are logged
USER_VARIABLES = frozenset(
    f"WANDB_{name}"
    for line in (
        "API_KEY IDENTITY_TOKEN_FILE CREDENTIALS_FILE ENTITY USERNAME USER_EMAIL",
        "BASE_URL APP_URL HTTP_PROXY HTTPS_PROXY X_PROXIES X_EXTRA_HTTP_HEADERS INSECURE_DISABLE_SSL",
        "HTTP_TIMEOUT INIT_TIMEOUT X_FILE_STREAM_TIMEOUT_SECONDS X_GRAPHQL_TIMEOUT_SECONDS",
        "CONFIG_DIR CACHE_DIR DATA_DIR ARTIFACT_DIR DEBUG CORE_DEBUG X_LOG_LEVEL",
    )
    for name in line.split()
)
"""Variables that wandb may read: credentials and the way to the server. wandb reads a variable for each of its
settings, and those of a single run would corrupt this one: WANDB_SWEEP_ID of an agent's shell gives every attempt
another id, WANDB_RESUME_FROM starts it elsewhere, WANDB_DISABLED drops it."""


class WandbTracker:
    whole_steps = True

    def __init__(self, tracked: TrackedRun) -> None:
        for name in [name for name in os.environ if name.startswith("WANDB_") and name not in USER_VARIABLES]:
            del os.environ[name]
        os.environ |= ENVIRONMENT
        import wandb  # reads those variables

        asked = tracked.logging.wandb
        assert asked is not None  # `upload` checked it
        shutil.rmtree(tracked.run.wandb_files, ignore_errors=True)  # of an earlier attempt, which this one repeats
        at_wandb = tracked.known.url is not None
        try:
            self._run = wandb.init(
                id=tracked.known.id,
                resume="allow" if asked.mode == "online" else None,
                name=None if at_wandb else tracked.name,  # the user may have renamed it at W&B
                project=asked.project,
                entity=asked.entity,
                group=asked.group,
                tags=None if at_wandb else asked.tags,
                mode=asked.mode,
                dir=str(tracked.run.root),
                config=tracked.recipe | tracked.fork,
                settings=wandb.Settings(
                    console="off",  # logs/ has the output of every rank
                    disable_git=True,  # the running code is the snapshot, not the current directory
                    save_code=False,
                    x_disable_meta=True,
                    x_disable_stats=True,  # they would show one node of many
                ),
            )
        except wandb.Error as error:
            raise TrackerRefused(str(error)) from error
        self.url: str | None = self._run.url
        self.next_step: int = self._run.starting_step

    def log(self, rows: Sequence[RecordRow]) -> None:
        for row in rows:
            if row.late:  # W&B takes no earlier step
                self._run.log(row.values | {"eval/step": row.step})
                continue
            self._run.log(row.values | ({"_timestamp": row.at} if row.at else {}), step=row.step)

    def finish(self, outcome: str | None) -> None:
        if outcome == DRAINED:
            self._run.mark_preempting()  # W&B then shows the run as preempted instead of failed
        self._run.finish(exit_code=0 if outcome == FINISHED else 1)
