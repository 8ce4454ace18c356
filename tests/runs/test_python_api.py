"""The example notebook on this machine: runs that Python submits, reads, repeats, evaluates and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest
import submitit
from notebook import executed

from launcher.api import BadInput, Run

NOTEBOOK = Path(__file__).parents[2] / "examples" / "python" / "runs.ipynb"


@pytest.mark.slow
def test_the_example_notebook_runs_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("MRL_CLUSTER", "local")
    names = executed(NOTEBOOK)
    run, job = names["run"], names["job"]
    assert [path.parent.name for path in (run.path, *(one.path for one in names["runs"].values()))] == ["runs"] * 3
    assert isinstance(job, submitit.LocalJob) and job.exception() is None
    assert "step 5" in job.stdout(), "it follows the run to its next attempt"
    pairs = names["same"].pairs()
    assert all(pair.differs_at is None and pair.largest_difference == 0 for pair in pairs)
    assert [pair.reward for pair in pairs] == names["group"].rewards
    assert any(pair.differs_at or pair.largest_difference for pair in names["later"].pairs()), "other weights"
    frame = run.metrics_frame()
    assert list(frame.index) == [1, 2, 3, 4, 5] and frame["mean_reward"].tolist()[0] == run.metrics()[0]["mean_reward"]
    with pytest.raises(BadInput, match="evaluate: greddy: unknown option; did you mean greedy"):
        run.evaluate(greddy=True)
    assert capfd.readouterr().err == "", "only the notebook prints"
    assert Run(run.path) == run
