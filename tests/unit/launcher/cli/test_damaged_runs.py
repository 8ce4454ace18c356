"""One damaged run directory causes no traceback and does not hide other runs (R11, I2)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from run_helpers import begin, submitted

from launcher.cli.completion import complete_run
from launcher.cli.main import main
from launcher.errors import BadInput
from megatron_rl.contract.paths import RunDir

FILES = (
    *("job.json", "attempts.jsonl", "resolved.yaml", "metrics.jsonl", "evaluations.jsonl", "plan.json", "DONE"),
    *("attempts/001/progress.json", "attempts/001/drain.json", "attempts/001/timeline.jsonl", "checkpoints/latest"),
)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDir, RunDir]:
    """Two runs in the index: one that will be damaged, and one that stays whole."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no Slurm
    found = submitted(tmp_path / "good"), submitted(tmp_path / "bad")
    for run in found:
        begin(run, 1)
        run.metrics.write_text('{"step": 1, "mean_reward": 0.5}\n')
        run.checkpoints.mkdir()
    return found


def mrl(*words: str) -> Result:
    done = CliRunner().invoke(main, words)
    assert done.exception is None or isinstance(done.exception, SystemExit | BadInput), done.exception
    return done


def damage(file: Path, content: bytes | None) -> None:
    if content is None:
        file.unlink(missing_ok=True)
        file.mkdir()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"{", b"\xff\xfe\x00", None])
def test_views_show_the_other_runs_if_one_is_damaged(runs, name, content):
    _, bad = runs
    damage(bad.root / name, content)
    table = {row["run"]: row for row in json.loads(mrl("ls", "--json").stdout)["runs"]}
    assert (table["good"]["state"], table["good"]["step"], table["good"]["last_reward"]) == ("lost", 1, 0.5)
    if (name, content) == ("resolved.yaml", None):
        assert "bad" not in table, "without a recipe it is no run"
    else:
        assert "bad" in table
        assert json.loads(mrl("status", "bad", "--json").stdout)["run"] == "bad"
        assert mrl("status", "bad").stdout.startswith("bad: ")
    assert mrl("status", "--all").exit_code in (0, 3)
    assert [item.value for item in complete_run(None, None, "go")] == ["good"]
    for words in (("cancel",), ("logs",), ("fork",), ("resume", "--dry-run")):
        mrl(*words, str(bad.root))


def test_a_deleted_run_is_not_listed(runs):
    shutil.rmtree(runs[1].root)
    assert [row["run"] for row in json.loads(mrl("ls", "--json").stdout)["runs"]] == ["good"]
