"""Record of a run with damaged lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.explain.record import read_record
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path)
    found.resolved.write_text(dump_resolved(load_recipe("demo", []).config), encoding="utf-8")
    return found


def test_damaged_lines_and_those_out_of_order_are_left_out_and_named(run: RunDir):
    run.metrics.write_text('{"step": 1}\n{"step": 2, "loss": NaN}\n{"step": 5}\n{"step": 3}\n{"step": 6}\n', "utf-8")
    record = read_record(run)
    assert [line.step for line in record.lines] == [1, 5, 6]
    assert record.left_out == [
        f"{run.metrics}: 1 lines are left out: line 2 is torn or not JSON (NaN is not finite)",
        f"{run.metrics}: 1 lines are left out, because they do not follow the previous step",
    ]


def test_a_last_line_that_is_being_written_is_no_damage(run: RunDir):
    run.metrics.write_text('{"step": 1}\n{"step": 2, "lo', "utf-8")
    record = read_record(run)
    assert ([line.step for line in record.lines], record.left_out) == ([1], [])
