"""A tiny model learns a tool task from a program that asks it through OpenAI's API, twice for each problem.

In the control, the program replies to calls with numbers that it draws. That withholds the information and nothing
else: whatever is learnt there was not learnt from the tool's results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_helpers import greedy_accuracy, mean_rewards, train
from optional import needs

from launcher.recipe.shipped import SHIPPED

pytestmark = [pytest.mark.slow, needs("datasets"), needs("openai")]

PROGRAM = SHIPPED / "programs" / "stock.py"
KNOWS = 'str(problem["pieces"]) if'
DRAWS = "__import__('random').choice('0123456789') if"


def test_the_demos_model_learns_a_tool_from_an_outside_program(tmp_path: Path) -> None:
    run_dir = train("demo-program", tmp_path, "save.every=0")
    first, last = mean_rewards(run_dir, first=3, last=10)
    assert first < 0.5 and last > 0.85
    few, many = mean_rewards(run_dir, first=3, last=10, metric="turns_mean")
    assert few < 1.6 and many > 1.9
    assert greedy_accuracy(run_dir, "held_out")[1] > 0.9


def test_without_the_tools_results_it_does_not(tmp_path: Path) -> None:
    text = PROGRAM.read_text()
    assert KNOWS in text
    (tmp_path / "stock.py").write_text(text.replace(KNOWS, DRAWS))
    run_dir = train("demo-program", tmp_path, "save.every=0", f"environment.args.code=['{tmp_path}/stock.py']")
    _, last = mean_rewards(run_dir, first=3, last=10)
    assert last < 0.25  # one guess in ten is right
