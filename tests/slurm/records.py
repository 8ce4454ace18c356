"""Runs whose ranks really train, and the parts of their records that no fault may change."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from json_files import read_json, read_json_lines
from lab import HERE, wait_until
from login import ALIVE, Login, Run

from megatron_rl.contract.paths import RunDir

STEPS = 10
SAVE_EVERY = 4
OVERRIDES = (
    *("job.nodes=2", "job.gpus_per_node=1"),
    *("job.collective_timeout_s=120", "job.backoff_s=1", "model.hidden_size=32", "model.ffn_hidden_size=48"),
    *("model.supervised.steps=60", "model.supervised.batch_size=16", "model.supervised.learning_rate=3e-3"),
    *("grpo.prompts_per_step=5", "grpo.group_size=4", "grpo.iterations=2", "grpo.kl_beta=0.05"),
    *(f"training.steps={STEPS}", f"save.every={SAVE_EVERY}", "evaluation.every=4"),
    *("environment.args.draws=1500", "environment.args.evaluation_problems=8"),
)
"""Two updates per step, a reference model, evaluations, and checkpoints after steps 4 and 8, so that a run of seconds
has every phase that a fault can interrupt."""
RECIPE = ("demo", "--cluster", "real", *OVERRIDES)
VARYING = ("time/", "throughput/", "system/")

WAIT = 300.0
"""Limit of each wait, in seconds. It is generous, because ranks import torch on a machine that may be busy."""


def hold(login: Login, *places: dict[str, Any]) -> None:
    """Hold the ranks of runs submitted from now on at `places` (held_rank.py), and skip the health check."""
    command = [sys.executable, str(HERE / "held_rank.py"), json.dumps(places)]
    login.profiles["real"] |= {
        "python": str(login.program("held", f'exec {shlex.join(command)} "$@"')),
        "health_check": False,
        "environment": {"MRL_CACHE": str(login.lab.cache)},
    }


def wait_until_held(run: Run, attempt: int = 1, *ranks: int) -> None:
    """Wait until these ranks, by default all, have reached the places given to `hold`."""
    folder = run.dir.attempt(attempt).folder

    def there() -> bool:
        assert (state := run.state()) in ALIVE, f"{state}\n{run.log()}"
        return all((folder / f"held.{rank}").exists() for rank in ranks or range(2))

    wait_until(f"the ranks of {run.dir.root} are held in attempt {attempt}", there, WAIT)


def pin(login: Login) -> None:
    """Confine runs submitted from now on to two nodes, so that a preempted run waits for them."""
    login.profiles["real"]["sbatch"] = ["--nodelist=node[09-10]"]


def preempt(login: Login, run: Run, *urgency: str) -> str:
    """Give the run's nodes to a more urgent job. Return the id of that job.

    urgency: options of sbatch; by default a partition of higher priority.
    """
    options = (f"--nodelist={run.field('NodeList')}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1000")
    urgent = login.lab.run("sbatch", "--parsable", *(urgency or ["--partition=high"]), *options).strip()
    login.jobs.append(urgent)
    return urgent


def wait_for_ends(run: Run, count: int) -> None:
    wait_until(f"{count} attempts of {run.dir.root} are over", lambda: len(run.ends()) >= count, WAIT)


def finish(run: Run) -> None:
    run.wait("COMPLETED", limit=WAIT)
    assert run.dir.done.exists(), run.log()


def resume(login: Login, run: Run, *overrides: str, **changes: str) -> Run:
    """Resume the run with `mrl resume` as another job. changes: environment variables of the command."""
    said = json.loads(login.call("mrl", "resume", run.dir.root, *overrides, "--json", **changes).stdout)
    assert said["job_id"] != run.job
    login.jobs.append(said["job_id"])
    return login.adopt(run.dir.root, said["job_id"])


def record(run: RunDir) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics of all steps and of all evaluations, without those that may differ between runs."""
    steps, evaluations = (
        [{key: value for key, value in line.items() if not key.startswith(VARYING)} for line in read_json_lines(file)]
        for file in (run.metrics, run.evaluations)
    )
    return steps, evaluations


def ordinals(run: RunDir) -> list[tuple[int, int, int]]:
    """Prompts of each step, which do not depend on the number of ranks."""
    return [(line["step"], line["first_ordinal"], line["next_ordinal"]) for line in read_json_lines(run.metrics)]


def seconds_to_leave(run: Run, attempt: int = 1) -> float:
    """Seconds from the request to leave to the end of the attempt, when its step is gone."""
    asked = read_json(run.dir.attempt(attempt).drain)["at"]
    (ended,) = [line["at"] for line in run.ledger() if (line["event"], line["attempt"]) == ("end", attempt)]
    return float(ended) - float(asked)


def kill_rank(run: Run, rank: int, step: str = "train", signum: int = signal.SIGKILL) -> bool:
    """Send a signal to one rank of a step. Return whether that rank existed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # the process has ended
        wanted = {f"SLURM_PROCID={rank}".encode(), f"MRL_STEP={step}".encode(), f"MRL_RUN_DIR={run.dir.root}".encode()}
        if b"--run-dir" in command and b"srun" not in command[0] and wanted <= set(environment):
            os.kill(int(process.name), signum)
            return True
    return False
