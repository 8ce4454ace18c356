"""tests/gpu/suite.py: its parts, their order, and results that a cut leaves."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def suite() -> Any:
    spec = importlib.util.spec_from_file_location("gpu_suite", ROOT / "tests" / "gpu" / "suite.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_suite"] = module
    spec.loader.exec_module(module)
    return module


def test_every_test_for_a_gpu_belongs_to_one_part(suite: Any) -> None:
    files = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    assert sorted(name for part in suite.PARTS for name in part.tests) == files
    scripts = [part.script[0] for part in suite.PARTS if part.script]
    assert all((ROOT / "tests" / "benchmarks" / name).exists() for name in scripts)


def test_parts_come_in_the_order_of_what_stands_on_what_and_fit_into_half_an_hour(suite: Any) -> None:
    names = [part.name for part in suite.PARTS]
    assert names[:6] == ["parity", "kernels", "decode", "graphs", "offload", "learning"]
    assert sum(part.limit_s for part in suite.PARTS) <= 1900


@pytest.fixture
def run(suite: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a suite of parts with the given tests, and return (exit code, results)."""
    monkeypatch.setattr(suite, "GPU", tmp_path)
    monkeypatch.setattr(suite, "machine", lambda: {"card": "No Card"})

    def start(tests: dict[str, str], *arguments: str) -> tuple[int, dict[str, Any]]:
        for name, text in tests.items():
            (tmp_path / f"test_{name}.py").write_text("import pytest\n" + text)
        parts = [suite.Part(name, 300, (f"test_{name}.py",)) for name in tests]
        code = suite.main(["--results", str(tmp_path / "results"), "--device", "cpu", *arguments], parts)
        (file,) = (tmp_path / "results").glob("gpu-tests-no-card-*.json")
        return code, json.loads(file.read_text())

    return start


def test_failures_and_reasons_of_skips_are_shown_and_recorded(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(
        {
            "first": "def test_a(): pass\ndef test_b(): pytest.skip('flash-attn is missing')",
            "second": "def test_c(record_property): record_property('us', 3); assert 1 == 2",
        }
    )
    assert code == 1
    first, second = found["parts"]
    assert (first["passed"], first["failed"], first["skipped"]) == (1, 0, 1)
    assert (second["passed"], second["failed"], second["skipped"]) == (0, 1, 0)
    assert second["tests"][0]["figures"] == {"us": 3}
    shown = capsys.readouterr().out
    assert "  1 skipped: flash-attn is missing" in shown
    assert "assert 1 == 2" in shown


def test_a_part_that_is_killed_keeps_the_results_of_its_tests(run: Any) -> None:
    code, found = run({"slow": "import os\ndef test_a(): pass\ndef test_b(): os.kill(os.getpid(), 9)"})
    (part,) = found["parts"]
    assert (code, part["failed"]) == (1, 1)
    assert [test["test"].rpartition("::")[2] for test in part["tests"]] == ["test_a"]


def test_a_part_that_takes_too_long_is_cut_off_with_its_children_and_says_where_it_was(suite: Any) -> None:
    program = "import subprocess, time\ndef hang(): time.sleep(600)\nsubprocess.Popen(['sleep', '600'])\nhang()"
    hangs, ends = [sys.executable, "-X", "faulthandler", "-c", program], ["sh", "-c", "echo done"]
    codes, output = suite._run([hangs, ends], dict(os.environ), 0.5)
    assert codes == [None, 0]
    assert "in hang" in output and "done" in output
    counts = {"passed": 1, "failed": 0, "skipped": 0}
    assert suite.line_of({"part": "slow", "seconds": 1.0, "cut": True, **counts}).endswith("1.0  cut off")


def test_a_file_that_cannot_be_imported_is_a_failure(run: Any) -> None:
    code, found = run({"broken": "import no_such_module", "whole": "def test_a(): pass"})
    assert code == 1
    assert [part["failed"] > 0 for part in found["parts"]] == [True, False]


def test_only_the_named_parts_run(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tests = dict.fromkeys(("first", "second"), "def test_a(): pass")
    code, found = run(tests, "second")
    assert (code, [part["part"] for part in found["parts"]]) == (0, ["second"])
    with pytest.raises(SystemExit):
        run(tests, "third")
    assert "unknown part third; parts are first, second" in capsys.readouterr().err
