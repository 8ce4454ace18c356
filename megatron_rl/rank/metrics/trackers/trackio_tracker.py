"""trackio.

Rows go to trackio's store or server in one call each, under ids that follow from the step and the metrics: of two rows
with the same id trackio keeps the first. `trackio.log` would queue rows under random ids and send those that it could
not deliver later, beside the same steps of the next attempt.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from megatron_rl.rank.metrics.trackers.record_rows import RecordRow
from megatron_rl.rank.metrics.trackers.tracker import TrackedRun
from megatron_rl.recipe.trackers import TrackioConfig

MOST_ROWS = 200  # in a call
ENVIRONMENT = {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "0"}  # jobs are offline; a Space is not


class TrackioTracker:
    whole_steps = True

    def __init__(self, tracked: TrackedRun) -> None:
        os.environ |= ENVIRONMENT
        asked = tracked.logging.trackio
        assert asked is not None  # `upload` checked it
        self._store = ServerStore(asked.server) if asked.server else LocalStore()
        self.url: str | None = self._store.url
        self._id, self._project = tracked.known.id, asked.project
        names = {run["id"]: run["name"] for run in self._store.runs(asked.project)}
        self._name = names.get(self._id) or tracked.name  # the user may have renamed it
        newest = self._store.newest(asked.project, self._id) if self._id in names else None
        self.next_step = 0 if newest is None else newest + 1
        self._config: dict[str, Any] | None = config_of(tracked, asked)

    def log(self, rows: Sequence[RecordRow]) -> None:
        run = {"project": self._project, "run": self._name, "run_id": self._id}
        for begin in range(0, len(rows), MOST_ROWS):
            self._store.add(run, self._id, rows[begin : begin + MOST_ROWS], self._config)
            self._config = None

    def finish(self, outcome: str | None) -> None:
        """trackio has no state of a run."""


def config_of(tracked: TrackedRun, asked: TrackioConfig) -> dict[str, Any]:
    """Recipe, and what trackio's pages read: names with an underscore."""
    created = datetime.now(UTC).isoformat()
    return tracked.recipe | tracked.fork | {"_Username": None, "_Created": created, "_Group": asked.group}


def log_id(name: str, row: RecordRow) -> str:
    """Id of a row: other metrics of the same step, such as those of a late evaluation, have another one."""
    return f"{name}-{row.step}-{zlib.crc32(' '.join(sorted(row.values)).encode()):08x}"


class LocalStore:
    def __init__(self) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # takes a second, and is only installed where it is asked for
        from trackio.utils import TRACKIO_DIR

        self._storage = SQLiteStorage
        self.url: str | None = str(TRACKIO_DIR)

    def runs(self, project: str) -> list[dict[str, Any]]:
        self._storage.validate_project_name(project)
        return list(self._storage.get_run_records(project))

    def newest(self, project: str, run_id: str) -> int | None:
        newest: int | None = self._storage.get_max_step_for_run(project, run_id=run_id)
        return newest

    def add(self, run: dict[str, str], name: str, rows: Sequence[RecordRow], config: dict[str, Any] | None) -> None:
        now = datetime.now(UTC)
        times = [datetime.fromtimestamp(row.at, UTC) if row.at else now for row in rows]
        self._storage.bulk_log(
            **run,
            metrics_list=[row.values for row in rows],
            steps=[row.step for row in rows],
            timestamps=[at.isoformat() for at in times],
            config=config,
            log_ids=[log_id(name, row) for row in rows],
        )


class ServerStore:
    """A trackio server: one that somebody started, or a Space of Hugging Face."""

    def __init__(self, server: str) -> None:
        from huggingface_hub import get_token
        from trackio.remote_client import RemoteClient

        self._token = None if "://" in server else get_token()
        token = os.environ.get("TRACKIO_WRITE_TOKEN")
        self._client = RemoteClient(server, hf_token=self._token, write_token=token, verbose=False)
        self.url: str | None = server if "://" in server else f"https://huggingface.co/spaces/{server}"

    def runs(self, project: str) -> list[dict[str, Any]]:
        return list(self._client.predict(project=project, api_name="/get_runs_for_project"))

    def newest(self, project: str, run_id: str) -> int | None:
        newest: int | None = self._client.predict(project=project, run_id=run_id, api_name="/get_run_summary")[
            "last_step"
        ]
        return newest

    def add(self, run: dict[str, str], name: str, rows: Sequence[RecordRow], config: dict[str, Any] | None) -> None:
        logs = [
            {**run, "metrics": row.values, "step": row.step, "config": config, "log_id": log_id(name, row)}
            for row in rows
        ]
        self._client.predict(logs=logs, hf_token=self._token, api_name="/bulk_log")
