"""Whole runs for tests: ranks are processes in `megatron_rl.rank_main`, which tests watch and may harm."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from checkpoint_helpers import ended
from core_helpers import tiny_model, tiny_run

from megatron_rl.contract.attempt_records import MetricsLine, Outcome
from megatron_rl.contract.codes import START_VARIABLE
from megatron_rl.contract.paths import Attempt as AttemptFiles
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, if_readable, read, read_lines

_CONTEXT = multiprocessing.get_context("forkserver")  # see conftest.py
VARYING = ("time/", "throughput/", "system/")


def loop_recipe(**sections: dict[str, Any]) -> dict[str, Any]:
    """Recipe with two ranks, two updates per step and all metrics. Supervised steps make the rewards differ."""
    taught = {"steps": 40, "batch_size": 16, "learning_rate": 3e-3}
    defaults: dict[str, dict[str, Any]] = {
        "job": {"gpus_per_node": 2, "collective_timeout_s": 30},
        "model": tiny_model(init="supervised", supervised=taught).model_dump(),
        "grpo": {
            "prompts_per_step": 5,
            "group_size": 4,
            "iterations": 2,
            "kl_beta": 0.05,
            "importance": {"upper": 2.0},
        },
        "training": {"steps": 16},
        "evaluation": {"every": 8},
        "save": {"every": 4},
        "resume": {"partial": "regenerate"},
        "logging": {"samples_every": 6},
    }
    for name, fields in sections.items():
        defaults[name] = defaults.get(name, {}) | fields
    return tiny_run(**defaults).model_dump()


def prepare(root: Path, recipe: dict[str, Any]) -> RunDir:
    root.mkdir(parents=True)
    run_dir = RunDir(root)
    run_dir.resolved.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run_dir.token.write_text(secrets.token_urlsafe() + "\n")
    return run_dir


class Attempt:
    """One start of all training ranks. `sabotage(rank)` runs first in each of them."""

    def __init__(self, run_dir: RunDir, cache: Path, ranks: int = 2, sabotage: Callable[[int], None] | None = None):
        self.run_dir = run_dir
        self.number = run_dir.last_attempt() + 1
        self.files = run_dir.attempt(self.number)
        self.processes = _start(run_dir, self.number, ranks, cache, "", {}, sabotage)
        self._cache = cache
        self.replicas: list[BaseProcess] = []

    def start_replica(
        self, number: int, ranks: int = 1, start: int = 0, sabotage: Callable[[int], None] | None = None
    ) -> list[BaseProcess]:
        environment = {START_VARIABLE: str(start)}
        started = _start(
            self.run_dir, self.number, ranks, self._cache, f"infer-{number}.{start}.", environment, sabotage, number
        )
        self.replicas += started
        return started

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        deadline, metrics, size = time.monotonic() + timeout_s, self.run_dir.metrics, 0
        while True:
            if metrics.exists() and (now := metrics.stat().st_size) != size:  # to read all lines each time costs a core
                size = now
                if any(line["step"] >= step for line in lines_of(metrics)):
                    return
            assert all(process.is_alive() for process in self.processes), f"ended before step {step}\n{self.logs()}"
            assert time.monotonic() < deadline, f"no step {step} within {timeout_s} s\n{self.logs()}"
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill all ranks, none of which may have finished."""
        for process in self.processes:
            process.kill()
        assert self.exit_codes() == [-9] * len(self.processes), self.logs()

    def exit_codes(self, timeout_s: float = 90.0) -> list[int | None]:
        return ended(self.processes, timeout_s)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-8000:] for path in sorted(self.run_dir.root.glob(f"log.{self.number}.*")))


def lines_of(record: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics or evaluations, with their steps."""
    lines = read_lines(MetricsLine, record)
    assert not isinstance(lines, Unreadable)
    return [{"step": line.step, **line.values} for line in lines.records]


def outcome_of(attempt: AttemptFiles) -> Outcome | None:
    return if_readable(read(Outcome, attempt.outcome))


def reproducible(run_dir: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return metrics and evaluations without those that may differ between runs."""
    steps, evaluations = (
        [{name: value for name, value in line.items() if not name.startswith(VARYING)} for line in lines_of(path)]
        for path in (run_dir.metrics, run_dir.evaluations)
    )
    return steps, evaluations


def read_error(attempt: Attempt, rank: int) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(attempt.files.error(rank).read_text(encoding="utf-8"))
    return error


def _start(
    run_dir: RunDir,
    attempt: int,
    ranks: int,
    cache: Path,
    name: str,
    environment: dict[str, str],
    sabotage: Callable[[int], None] | None,
    replica: int | None = None,
) -> list[BaseProcess]:
    """Start the ranks of one world. replica: number of the inference replica; None: training ranks."""
    arguments = ["--run-dir", str(run_dir.root), "--attempt", str(attempt)]
    if replica is not None:
        arguments += ["--replica", str(replica)]
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MRL_CACHE": str(cache)}
        log = run_dir.root / f"log.{attempt}.{name}{rank}"
        args = (place | environment, log, arguments, sabotage)
        processes.append(_CONTEXT.Process(target=_rank, args=args, daemon=True))
    for process in processes:
        process.start()
    return processes


def _rank(environment: dict[str, str], log: Path, arguments: list[str], sabotage: Callable[[int], None] | None) -> None:
    os.environ.update(environment, MRL_PARENT_PID=str(os.getppid()))
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, sys.stdout.fileno())
    os.dup2(file, sys.stderr.fileno())
    if "--replica" in arguments:
        from megatron_rl.replica_main import main
    else:
        from megatron_rl.rank_main import main

    if sabotage is not None:
        sabotage(int(environment["RANK"]))
    main(arguments)
