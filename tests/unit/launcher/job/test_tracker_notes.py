"""Variables that trackers need in a job and would not have are noted at its submission."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.job.draft import draft
from launcher.recipe.load import load_recipe

SPACE, SERVER = "logging.trackio={project: p, server: me/runs}", "logging.trackio={project: p, server: http://a:7860}"
ADDRESS = "logging.mlflow={experiment: e, uri: https://mlflow}"


@pytest.mark.parametrize(
    ("override", "secrets", "noted"),
    [
        ("logging.wandb.project=p", [], ["WANDB_API_KEY"]),
        ("logging.wandb.project=p", ["WANDB_API_KEY"], []),
        ("logging.wandb={project: p, mode: offline}", [], []),
        ("logging.mlflow.experiment=e", [], ["MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"]),
        ("logging.mlflow.experiment=e", ["MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"], []),
        (ADDRESS, [], ["MLFLOW_TRACKING_TOKEN"]),
        ("logging.trackio.project=p", [], []),
        (SERVER, [], ["TRACKIO_WRITE_TOKEN"]),
        (SPACE, [], ["HF_TOKEN"]),
        (SPACE, ["HF_TOKEN"], []),
    ],
)
def test_variables_that_a_job_lacks_are_noted(
    override: str, secrets: list[str], noted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.setenv(name, "set")
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    profile = load_clusters(environ={"HOME": str(tmp_path)}).profile("h100").model_copy(update={"secrets": secrets})
    notes = draft(load_recipe("demo", [override]), "h100", profile, tmp_path / "run").notes
    assert [note.split()[1] for note in notes if "is not among the secrets of h100" in note] == noted
