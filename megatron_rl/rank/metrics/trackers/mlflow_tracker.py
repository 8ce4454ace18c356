"""MLflow.

An MLflow run keeps every value that is logged for a step, so a repeated step would show twice. The last metric of a row
is STEP: its newest value says which row MLflow has last. Stores write the metrics of a request in their order or all at
once, so at most the row that follows is there in part, and that one is compared with what MLflow has.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.contract.codes import DRAINED, FINISHED
from megatron_rl.rank.metrics.trackers.record_rows import RecordRow
from megatron_rl.rank.metrics.trackers.tracker import TrackedRun, TrackerRefused
from megatron_rl.recipe.section import flat
from megatron_rl.recipe.trackers import MlflowConfig

STEP = "mrl/step"
TAG = "mrl.run"  # tag with the id of the run
MOST_METRICS, MOST_PARAMS = 1000, 100  # in a request
LONGEST_PARAM = 500  # characters; older servers take no more
ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ENABLE_ASYNC_LOGGING": "false"}


class MlflowTracker:
    whole_steps = True

    def __init__(self, tracked: TrackedRun) -> None:
        os.environ |= ENVIRONMENT
        from mlflow.entities import Metric, Param, RunTag  # reads those variables
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._tag = Metric, Param, RunTag
        asked = tracked.logging.mlflow
        assert asked is not None  # `upload` checked it
        store = f"sqlite:///{tracked.run.mlflow_store.absolute()}"
        uri = asked.uri or os.environ.get("MLFLOW_TRACKING_URI") or store
        self._client = MlflowClient(tracking_uri=uri)
        experiment = self._experiment(asked.experiment)
        self._id = self._run(experiment, asked, tracked)
        at_mlflow = self._client.get_run(self._id).data
        self._note_recipe(parameters(tracked.recipe), at_mlflow.params)
        self.next_step = int(at_mlflow.metrics[STEP]) + 1 if STEP in at_mlflow.metrics else 0
        self._in_part = bool(at_mlflow.metrics)
        shown = re.sub(r"://[^/@]*@", "://", uri)
        self.url: str | None = f"{shown}/#/experiments/{experiment}/runs/{self._id}" if "://" in shown else shown

    def log(self, rows: Sequence[RecordRow]) -> None:
        batch: list[Any] = []
        for row in rows:
            metrics = self._metrics(row)
            if len(batch) + len(metrics) > MOST_METRICS:
                self._client.log_batch(self._id, metrics=batch)
                batch = []
            batch += metrics
        self._client.log_batch(self._id, metrics=batch)

    def finish(self, outcome: str | None) -> None:
        if outcome == DRAINED:
            self._client.update_run(self._id, status="SCHEDULED")  # it continues in another attempt
        else:
            self._client.set_terminated(self._id, "FINISHED" if outcome == FINISHED else "FAILED")

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run may have created it by now
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        if found.lifecycle_stage != "active":
            raise TrackerRefused(
                f"logging.mlflow: experiment {name} is deleted; `mlflow experiments restore -x {found.experiment_id}` "
                "brings it back"
            )
        return str(found.experiment_id)

    def _run(self, experiment: str, asked: MlflowConfig, tracked: TrackedRun) -> str:
        """Find the run by its tag, which also finds one whose creation nobody lived to note, or create it."""
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{tracked.known.id}'", max_results=1)
        if found:
            self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        fork = {f"mrl.fork.{name}": str(value) for name, value in tracked.fork.get("fork", {}).items()}
        tags = asked.tags | fork | {TAG: tracked.known.id}
        return str(self._client.create_run(experiment, run_name=tracked.name, tags=tags).info.run_id)

    def _note_recipe(self, recipe: Mapping[str, str], known: Mapping[str, str]) -> None:
        """Log the recipe as parameters. MLflow changes none: a key that a resumed run has changed becomes a tag."""
        new = [self._param(name, value) for name, value in recipe.items() if name not in known]
        for begin in range(0, len(new), MOST_PARAMS):
            self._client.log_batch(self._id, params=new[begin : begin + MOST_PARAMS])
        for name, value in recipe.items():
            if known.get(name, value) != value:
                self._client.set_tag(self._id, f"changed.{name}", value)

    def _metrics(self, row: RecordRow) -> list[Any]:
        """Metrics of a row; of the first one only those that MLflow lacks."""
        values = {allowed(name): float(value) for name, value in row.values.items()}
        if self._in_part:
            there = {name for name in values if self._has(name, row.step)}
            values = {name: value for name, value in values.items() if name not in there}
        self._in_part = False
        at = int((row.at or time.time()) * 1000)
        shown = [] if row.late else [(STEP, float(row.step))]
        return [self._metric(name, value, at, row.step) for name, value in [*values.items(), *shown]]

    def _has(self, name: str, step: int) -> bool:
        return any(one.step >= step for one in self._client.get_metric_history(self._id, name))


def allowed(name: str) -> str:
    """Return a name with the characters that MLflow takes, such as pass_4 for pass@4."""
    return re.sub(r"[^/\w.\- ]", "_", name)[:250]


def parameters(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Keys and values of a recipe as MLflow takes them: {"grpo.group_size": "8"}."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat(recipe).items()}
    return {allowed(key): text[:LONGEST_PARAM] for key, text in texts.items()}
