"""Time of a dry run, beside the bare import of the libraries that mrl uses, in turns.

python tests/benchmarks/startup.py [--repeats 11] [--nemo-run PYTHON]

--nemo-run   python of a virtual environment with nemo_run, whose import is timed too
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

BIN = Path(sys.executable).parent
COMMANDS = {
    "import submitit, pydantic, yaml, jinja2": [sys.executable, "-c", "import submitit, pydantic, yaml, jinja2"],
    "mrl-submit demo --dry-run": [str(BIN / "mrl-submit"), "demo", "--dry-run"],
    "mrl-submit qwen2.5-32b-dapo --cluster h100 --dry-run": [
        *(str(BIN / "mrl-submit"), "qwen2.5-32b-dapo", "--cluster", "h100", "--dry-run")
    ],
}
LIMIT_S = 0.5
LIMIT_RATIO = 2.0


def seconds(command: list[str], folder: str) -> float:
    """Wall time of a command whose modules are compiled, as an installed library's are."""
    environ = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
    quiet = subprocess.DEVNULL
    began = time.perf_counter()
    # Without a timeout, because Python would then poll for the end of the process every 50 ms.
    subprocess.run(command, cwd=folder, env=environ, stdout=quiet, stderr=quiet, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--nemo-run", metavar="PYTHON")
    options = parser.parse_args()
    commands = dict(COMMANDS)
    if options.nemo_run:
        commands["import nemo_run"] = [options.nemo_run, "-c", "import nemo_run"]
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(options.repeats + 1):
            for name, command in commands.items():
                taken = seconds(command, folder)
                if turn:  # fills caches
                    times[name].append(taken)
    base = times["import submitit, pydantic, yaml, jinja2"]
    print(f"{'':<54} {'fastest':>8} {'median':>8}  ratio of medians (at most {LIMIT_S} s and {LIMIT_RATIO})")
    for name, taken in times.items():
        print(f"{name:<54} {min(taken):>7.3f}s {median(taken):>7.3f}s  {median(taken) / median(base):.2f}")


if __name__ == "__main__":
    main()
