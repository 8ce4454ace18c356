"""Record how long the files of tests took, in wall-clock and processor seconds: `pytest --durations-file FILE`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

NOTED_S = 0.5
"""Files that take less stand only in the sum of their folder, which keeps changes of the record short."""


class Spent(NamedTuple):
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tests: int = 0

    def plus(self, other: Spent) -> Spent:
        return Spent(*(a + b for a, b in zip(self, other, strict=True)))

    def rounded(self) -> dict[str, float]:
        return {"seconds": round(self.seconds, 1), "cpu_seconds": round(self.cpu_seconds, 1), "tests": self.tests}


def tree_cpu_seconds() -> float:
    """Processor time of this process and its descendants. Daemons that left the tree, such as Slurm's, do not count."""
    import psutil

    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])  # user and system, of the process and of its dead children
    return total


class FileTimer:
    """Measure each file in the process that runs its tests."""

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = defaultdict(Spent)
        self._began: tuple[float, float] | None = None
        self._tests = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._began is None:
            self._began = time.perf_counter(), tree_cpu_seconds()
        self._tests += 1
        result = yield
        if nextitem is None or nextitem.path != item.path:
            wall, cpu = self._began
            took = Spent(time.perf_counter() - wall, max(0.0, tree_cpu_seconds() - cpu), self._tests)
            file = item.nodeid.partition("::")[0]
            self.spent[file] = self.spent[file].plus(took)
            self._began, self._tests = None, 0
        return result


class WorkerDurations(FileTimer):
    """Send the measurements of a worker of pytest-xdist to the process that started it."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] = session.config.workeroutput  # type: ignore[attr-defined]
        output["spent"] = {file: list(spent) for file, spent in self.spent.items()}


class Durations(FileTimer):
    """Write the record at the end of a session in which every test passed."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self._target = target
        self._start = time.perf_counter()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for file, spent in getattr(node, "workeroutput", {}).get("spent", {}).items():
            self.spent[file] = self.spent[file].plus(Spent(*spent))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.OK and self.spent:
            workers = session.config.getoption("numprocesses", None) or 1
            found = record(dict(self.spent), time.perf_counter() - self._start, workers)
            self._target.write_text(as_json(found), encoding="utf-8")


def record(spent: dict[str, Spent], wall_s: float, workers: int) -> dict[str, Any]:
    """Costs by folder and, of files that take long, by file; the dearest stand first."""
    folders: dict[str, Spent] = defaultdict(Spent)
    for file, cost in spent.items():
        folder = folder_of(file)
        folders[folder] = folders[folder].plus(cost)
    total = Spent()
    for cost in spent.values():
        total = total.plus(cost)
    long = {file: cost for file, cost in spent.items() if max(cost.seconds, cost.cpu_seconds) >= NOTED_S}
    return {
        "machine": {
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        },
        "workers": workers,
        "wall_seconds": round(wall_s, 1),
        "cpu_seconds": round(total.cpu_seconds, 1),
        "tests": total.tests,
        "folders": {name: cost.rounded() for name, cost in dearest_first(folders)},
        "files": {name: cost.rounded() for name, cost in dearest_first(long)},
    }


def as_json(found: dict[str, Any]) -> str:
    """JSON with one line for each folder and file."""
    parts = []
    for name, value in found.items():
        if isinstance(value, dict) and all(isinstance(each, dict) for each in value.values()):
            rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(each)}" for key, each in value.items())
            parts.append(f" {json.dumps(name)}: {{\n{rows}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def folder_of(file: str) -> str:
    """Folders below `tests`, at most three: of `tests/unit/megatron_rl/learn/rollout/test_bank.py`, all of them."""
    return "/".join(Path(file).parent.parts[:4])


def dearest_first(costs: dict[str, Spent]) -> list[tuple[str, Spent]]:
    return sorted(costs.items(), key=lambda pair: (-pair[1].seconds, pair[0]))


def processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
