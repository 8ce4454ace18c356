"""Plugin of pytest with which tests/gpu/suite.py learns the result of each test, even if the tests are cut off: it
appends a line of JSON to a file in the folder MRL_GPU_REPORTS."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    reason = ""
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
    elif report.failed:
        reason = str(report.longreprtext)[-8000:]
    result = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 3), "reason": reason}
    with Path(os.environ["MRL_GPU_REPORTS"], f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(result | {"figures": dict(report.user_properties)}) + "\n")
