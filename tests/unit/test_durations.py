"""The record of how long tests take."""

from __future__ import annotations

import json

from durations import Spent, as_json, record


def test_files_are_summed_by_folder_and_short_ones_are_not_listed() -> None:
    spent = {
        "tests/unit/launcher/plan/test_a.py": Spent(0.3, 0.2, 4),
        "tests/unit/launcher/plan/test_b.py": Spent(2.04, 1.0, 2),
        "tests/runs/test_c.py": Spent(9.0, 20.0, 1),
    }
    found = record(spent, 6.5, workers=2)
    assert (found["cpu_seconds"], found["wall_seconds"], found["tests"]) == (21.2, 6.5, 7)
    assert [*found["folders"]] == ["tests/runs", "tests/unit/launcher/plan"], "the dearest first"
    assert found["folders"]["tests/unit/launcher/plan"] == {"seconds": 2.3, "cpu_seconds": 1.2, "tests": 6}
    assert [*found["files"]] == ["tests/runs/test_c.py", "tests/unit/launcher/plan/test_b.py"]
    text = as_json(found)
    assert json.loads(text) == found
    assert any(line.startswith('  "tests/runs/test_c.py": {"seconds": 9.0') for line in text.splitlines())
