"""Variables that trackers need in a job and that it would not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from launcher.cluster.profile import Profile
from megatron_rl.recipe.logs import LoggingConfig

MLFLOW_VARIABLES = (
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
)


def tracker_notes(config: LoggingConfig, profile: Profile, cluster: str, environ: Mapping[str, str]) -> list[str]:
    """environ: environment of the shell that submits."""
    absent = f"is not among the secrets of {cluster}"
    return [
        f"logging.{tracker}: {variable} {absent}: {consequence}"
        for tracker, variable, consequence in _wanted(config, environ)
        if variable not in profile.secrets
    ]


def _wanted(config: LoggingConfig, environ: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    if config.wandb and config.wandb.mode == "online":
        yield "wandb", "WANDB_API_KEY", "the job has no key, unless the nodes' ~/.netrc has one"
    if config.mlflow:
        for variable in MLFLOW_VARIABLES[bool(config.mlflow.uri) :]:
            if environ.get(variable):
                yield "mlflow", variable, "it is set here, and the job will not have it"
    if config.trackio and config.trackio.server:
        variable = "TRACKIO_WRITE_TOKEN" if "://" in config.trackio.server else "HF_TOKEN"
        yield "trackio", variable, f"the job may not write to {config.trackio.server}"
