"""Recipe keys of experiment trackers: Weights & Biases, MLflow and trackio."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator

from megatron_rl.recipe.section import Section

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
"""Tracker, which is a key of `logging` and an extra of mrl -> distribution that it needs where the ranks run."""


def _without_secret(value: object) -> object:
    """Refuse an address with a password or token; before validation, whose messages would show the value."""
    if isinstance(value, str) and re.search(
        r"://[^/@\s]*@|[?&][^=\s]*(token|password|secret|key)[^=\s]*=", value, re.I
    ):
        raise ValueError(
            "holds a password or token, and others can read recipes: leave it out here, and export it as a variable "
            "(`secrets` of the cluster profile)"
        )
    return value


Address = Annotated[str, BeforeValidator(_without_secret)]


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


class MlflowConfig(Section):
    """MLflow: one MLflow run per run, however often the run starts. Needs the extra `mlflow` of mrl where the ranks
    run. Credentials are variables there, such as MLFLOW_TRACKING_TOKEN (`secrets` of the cluster profile)."""

    experiment: str
    """Experiment of MLflow; created if it does not exist."""
    uri: Address | None = None
    """Address of the tracking server (https://...) or of a store (sqlite:////absolute/path.db). Default: the variable
    MLFLOW_TRACKING_URI where the ranks run; without it, `mlflow.db` of the run directory, which `mlflow ui
    --backend-store-uri sqlite:///RUN_DIR/mlflow.db` shows."""
    tags: dict[str, str] = {}
    """Tags of the MLflow run."""


class TrackioConfig(Section):
    """trackio: one trackio run per run, however often the run starts. Needs the extra `trackio` of mrl where the ranks
    run."""

    project: str
    """Project of trackio."""
    group: str | None = None
    """Group that shows this run together with others of the project."""
    server: Address | None = None
    """Trackio server (http://HOST:PORT), which needs TRACKIO_WRITE_TOKEN where the ranks run, or an existing Space of
    Hugging Face (USER/NAME), which needs HF_TOKEN there (`secrets` of the cluster profile). Default: trackio's local
    store, the folder that TRACKIO_DIR names, or `trackio` in HF_HOME; `trackio sync` copies it to a Space."""
