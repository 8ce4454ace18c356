"""If the code of a task fails, terminal and status show its file and line, and no frame of mrl."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import run

from megatron_rl.contract.attempt_records import RankError
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import read

TASK = '''import os
from megatron_rl.agent.reward_only import RewardOnlyAgent
from megatron_rl.agent.trajectories import Problem
from megatron_rl.recipe.section import Section


class Task(RewardOnlyAgent):
    """Counts, and fails as it is told to."""

    class Config(Section):
        fails: str

    def __init__(self, config, tokenizer):
        super().__init__(config, tokenizer)
        self.first = int("one") if config.fails == "constructor" and "RANK" in os.environ else 1

    def training_problems(self):
        return [Problem(f"{number}+1=", {"answer": str(number + 1)}) for number in range(self.first, 9)]

    def evaluation_problems(self):
        return {}

    def get_reward(self, response, golden, finish_reason):
        return float(response == golden["answr"])
'''
RECIPE = ("environment.name=broken-task", "model.init=from-scratch", "job.gpus_per_node=1", "training.steps=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "code", "headline", "source", "error"),
    [
        (
            "reward",
            1,
            "in step 1 (training): AllAnswersLost: no answer of step 1 could be scored: 512 x get_reward at "
            "broken_task.py:24: KeyError: 'answr'",
            'return float(response == golden["answr"])',
            "KeyError: 'answr'",
        ),
        (
            "constructor",
            2,
            "in step 0 (starting): ConfigurationError: invalid literal for int() with base 10: 'one' "
            '(broken_task.py:15: self.first = int("one") if config.fails == "constructor" and "RANK" in os.environ '
            "else 1)",
            'self.first = int("one") if config.fails == "constructor" and "RANK" in os.environ else 1',
            "ValueError: invalid literal for int() with base 10: 'one'",
        ),
    ],
)
def test_terminal_shows_the_line_of_the_environment_that_failed(
    tmp_path: Path, fails: str, code: int, headline: str, source: str, error: str
) -> None:
    (tmp_path / "broken_task.py").write_text(TASK)
    info = tmp_path / "broken_task-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-task\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[mrl.environments]\nbroken-task = broken_task:Task\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    words = [*RECIPE, f"environment.args.fails={fails}"]
    before = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    ended = run(["mrl-submit", "demo", "--run-dir", tmp_path / "run", *words], timeout=240, env=env, before=before)
    assert ended.returncode == code, ended.stderr
    shown = [line.removeprefix("  | ") for line in ended.stderr.splitlines() if line.startswith("  | ")]
    assert f"failed: rank 0 {headline}\n" in ended.stderr
    assert shown[0] == "Traceback (most recent call last):" and shown[-1] == error
    assert shown[1].startswith(f'  File "{tmp_path}/broken_task.py", line ') and shown[2].strip() == source
    report = read(RankError, RunDir(tmp_path / "run").attempt(1).error(0))
    assert isinstance(report, RankError)
    status = run(["mrl", "status", tmp_path / "run"], timeout=60, env=env)
    assert f": {report.error}" in status.stdout
