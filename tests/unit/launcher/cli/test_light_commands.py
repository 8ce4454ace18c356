"""Commands that only read do not import what checks recipes, and lists of commands import no command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_helpers import begin, end, submitted

from launcher.cli.help import SECTIONS_TOO
from launcher.cli.main import COMMANDS
from launcher.cli.show.help_pages import Keys
from megatron_rl.contract.codes import FINISHED

OF_RECIPES = {"pydantic", "pydantic_core", "megatron_rl.recipe.section", "launcher.recipe.load"}
OF_READING = {"yaml", "launcher.runs.state", "concurrent.futures", *OF_RECIPES}
OF_RANKS = {"torch", "numpy", "megatron", "transformers", "datasets", "rich"}

PROGRAM = """
import sys
from launcher.cli import entry
try:
    entry.mrl()
except SystemExit as end:
    assert not end.code, end.code
print(*sys.modules, file=sys.stderr)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no Slurm
    run = submitted(tmp_path / "mine")
    begin(run, 1)
    end(run, 1, FINISHED)
    run.done.touch()
    run.metrics.write_text('{"step": 1, "mean_reward": 0.5}\n')
    log = run.attempt(1).logs / "train.0.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("ready\n")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        ("status mine", OF_RECIPES),
        ("status mine --json", OF_RECIPES),
        ("ls", OF_RECIPES),
        ("logs mine", OF_RECIPES),
        ("help mean_reward", OF_RECIPES),
        ("--help", OF_READING),
        ("help", OF_READING),
        ("help status", OF_READING),
    ],
)
def test_a_command_that_reads_imports_little(recorded: Path, words: str, heavy: set[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        cwd=recorded, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not set(done.stderr.split()) & (heavy | OF_RANKS)


def test_help_of_a_command_shows_the_section_of_that_name():
    known = Keys().known
    assert {name for name in COMMANDS if (name,) in known} == {*SECTIONS_TOO}
