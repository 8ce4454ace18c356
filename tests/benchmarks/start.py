"""Seconds from `mrl-submit demo` to the first sampled token and the first step, phase by phase.

    python tests/benchmarks/start.py [--repeats 5] [--resumed]

Starts the demo on this machine as a user would, with marks in its processes (start_marks/sitecustomize.py), and
prints the median of each phase: seconds of the clock, and of the processor in the process that the phase is about. The
phases follow one another: mrl-submit, then the supervisor, then rank 0, beside which rank 1 does the same. The base
model comes from its cache, as in each start but the first. --resumed: a run that has ended after its first checkpoint
trains on, as after a requeue. No time is asserted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
TIMEOUT_S = 600
SUBMIT, SUPERVISOR, RANK = "mrl-submit", "supervisor", "rank 0"


class Phase(NamedTuple):
    process: str
    what: str
    until: str
    """Mark that ends it; it begins with the end of the phase above."""


PHASES = (
    Phase(SUBMIT, "interpreter", "begin"),
    Phase(SUBMIT, "imports", "launch"),
    Phase(SUBMIT, "clusters, recipe", "plan_runs/"),
    Phase(SUBMIT, "checks", "run_on_this_machine"),
    Phase(SUBMIT, "checks, plan, run directory", "_start"),
    Phase(SUPERVISOR, "interpreter", "begin"),
    Phase(SUPERVISOR, "imports, lock, directories", "LocalRanks.start"),
    Phase(RANK, "interpreter", "begin"),
    Phase(RANK, "heartbeat, listener", "import megatron_rl.recipe.config"),
    Phase(RANK, "schema, recipe", "import torch"),
    Phase(RANK, "import of torch", "import megatron.core"),
    Phase(RANK, "import of megatron-core, mrl", "run_attempt"),
    Phase(RANK, "device, kernels", "connect"),
    Phase(RANK, "process groups", "connect/"),
    Phase(RANK, "problems, tokenizer", "build_material/"),
    Phase(RANK, "models, optimizer", "build_models/"),
    Phase(RANK, "checkpoint", "restore/"),
    Phase(RANK, "engine, cache", "build_generation/"),
    Phase(RANK, "driver, lesson, record", "set_up/"),
    Phase(RANK, "to the first token", "Engine.step/"),
    Phase(RANK, "to the end of the first step", "train_step/"),
)

Marks = Mapping[str, tuple[float, float]]
"""Mark -> unix time, CPU seconds of its process."""


def read_marks(folder: Path) -> dict[str, Marks]:
    """Return the marks of each process, found by a mark that it alone has; of the ranks those of the first."""
    found = [
        {name: (at, cpu) for name, at, cpu in map(json.loads, file.read_text(encoding="utf-8").splitlines())}
        for file in sorted(folder.iterdir(), key=lambda file: int(file.name))
    ]
    alone = {SUBMIT: "launch", SUPERVISOR: "LocalRanks.start", RANK: "run_attempt"}
    return {process: next(marks for marks in found if mark in marks) for process, mark in alone.items()}


def start(run: Path, words: Sequence[str]) -> list[tuple[float, float]]:
    """Run mrl-submit to its end, and return (seconds of the clock, of the processor) of each phase."""
    with tempfile.TemporaryDirectory() as marks:
        path = os.pathsep.join(filter(None, [str(HERE / "start_marks"), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path, "MRL_START_MARKS": marks}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile all modules again
        command = [str(Path(sys.executable).with_name("mrl-submit")), "demo", "--run-dir", str(run), *words]
        began = time.time()
        subprocess.run(command, env=environ, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
        processes = read_marks(Path(marks))
    found, last, cpu, process = [], began, 0.0, ""
    for phase in PHASES:
        if phase.process != process:
            cpu, process = 0.0, phase.process
        at, used = processes[phase.process][phase.until]
        found.append((at - last, used - cpu))
        last, cpu = at, used
    return found


def table(measured: Sequence[Sequence[tuple[float, float]]]) -> str:
    rows = [[*map(statistics.median, zip(*starts, strict=True))] for starts in zip(*measured, strict=True)]
    lines = [f"{'process':12} {'phase':32} {'seconds':>8} {'CPU':>6} {'at':>6}"]
    at = 0.0
    for phase, (clock, cpu) in zip(PHASES, rows, strict=True):
        at += clock
        lines.append(f"{phase.process:12} {phase.what:32} {clock:8.2f} {cpu:6.2f} {at:6.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--resumed", action="store_true")
    options = parser.parse_args()
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder, "first"), ["training.steps=1"])  # compiles modules, and fills the cache of the base model
        for number in range(options.repeats):
            run, words = Path(folder, str(number)), ["training.steps=1"]
            if options.resumed:
                start(run, words)
                words = ["training.steps=2", "--change"]
            measured.append(start(run, words))
    print(table(measured))
    print(f"medians of {options.repeats} starts; load of this machine {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
