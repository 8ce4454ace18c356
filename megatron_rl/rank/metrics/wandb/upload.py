"""Upload the record of a run to Weights & Biases:

    python -P -m megatron_rl.rank.metrics.wandb.upload RUN_DIR

mirror.py starts it beside the run; started by hand it uploads what W&B misses of a run that has ended.

A run that resumes from a checkpoint repeats steps that W&B already has. But the history of a W&B run only grows: a
resumed W&B run drops steps up to its last one (docs.wandb.ai/models/support/seeing_fewer_data_points_logged); rewinding
it (`resume_from`) is a preview that self-hosted servers lack; and no documentation promises that a new run under an old
id replaces the history (github.com/wandb/wandb/issues/1450, 3424, 6216). So the W&B run is resumed, W&B reports its
last step, and the upload continues from there: each step once, including steps that an earlier attempt could not send
and those a fork has from its source. W&B keeps the first value of a repeated step, metrics.jsonl the last; they differ
if `resume.partial` or the device permits it.

Offline there is nobody to ask. Every attempt then writes the whole record, in place of the previous one.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import yaml

from megatron_rl.contract.attempt_records import MetricsLine, Outcome, TimelineLine
from megatron_rl.contract.codes import DRAINED, EXIT_CRASHED, FINISHED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import RecordTail, Unreadable, if_readable, read, read_lines, write
from megatron_rl.contract.run_records import Fork, WandbRun
from megatron_rl.recipe.config import RunConfig

POLL_S = 5.0
PATIENCE_S = 30.0  # seconds for a file that cannot be read
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SHOW_INFO": "false"}  # no telemetry; errors alone are logged
USER_VARIABLES = frozenset(
    f"WANDB_{name}"
    for line in (
        "API_KEY IDENTITY_TOKEN_FILE CREDENTIALS_FILE ENTITY USERNAME USER_EMAIL",
        "BASE_URL APP_URL HTTP_PROXY HTTPS_PROXY X_PROXIES X_EXTRA_HTTP_HEADERS INSECURE_DISABLE_SSL",
        "HTTP_TIMEOUT INIT_TIMEOUT X_FILE_STREAM_TIMEOUT_SECONDS X_GRAPHQL_TIMEOUT_SECONDS",
        "CONFIG_DIR CACHE_DIR DATA_DIR ARTIFACT_DIR DEBUG CORE_DEBUG X_LOG_LEVEL",
    )
    for name in line.split()
)
"""Variables that wandb may read: credentials and the way to the server. wandb reads a variable for each of its
settings, and those of a single run would corrupt this one: WANDB_SWEEP_ID of an agent's shell gives every attempt
another id, WANDB_RESUME_FROM starts it elsewhere, WANDB_DISABLED drops it."""


class RecordRow(NamedTuple):
    step: int
    at: float | None  # Unix time of the step; None if unknown
    values: dict[str, float]


class RecordReader:
    """Rows of the record by step, each once."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._steps = RecordTail(MetricsLine, run.metrics)
        self._evaluations = RecordTail(MetricsLine, run.evaluations)
        self._timeline = RecordTail(TimelineLine, attempt.timeline)
        self._at: dict[int, float] = {}
        for number in range(1, attempt.number):
            lines = read_lines(TimelineLine, run.attempt(number).timeline)
            if not isinstance(lines, Unreadable):  # its steps are then shown without their time
                self._at |= times(lines.records)
        self._rows: dict[int, dict[str, float]] = {}
        self._newest = -1

    def rows(self, *, complete: bool) -> list[RecordRow]:
        """New rows. Holds the last step back unless the record is complete: its evaluation may still follow, perhaps in
        the next attempt."""
        # In this order: the evaluation of a step is written before the step that follows.
        steps, evaluations = self._steps.new(), self._evaluations.new()
        for line in [*steps, *evaluations]:
            self._rows.setdefault(line.step, {}).update(numbers(line.values))
        self._newest = max([self._newest, *(line.step for line in steps)])
        self._at |= times(self._timeline.new())
        ready = sorted(step for step in self._rows if complete or step < self._newest)
        return [RecordRow(step, self._at.get(step), self._rows.pop(step)) for step in ready]


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def times(lines: Iterable[TimelineLine]) -> dict[int, float]:
    """{step: unix time of its end}. Omits lines of a load, which repeat the step that was resumed from."""
    return {line.step: line.at for line in lines if line.resumed is None}


def upload(run: RunDir, attempt: Attempt, over: threading.Event) -> None:
    """Upload the record until `over` reports that it is complete. Ends the process if W&B refuses."""
    import wandb  # takes a second, and is only installed where a recipe asks for it

    recipe = yaml.safe_load(run.resolved.read_text(encoding="utf-8"))
    asked = RunConfig.model_validate(recipe).logging.wandb
    assert asked is not None  # the mirror starts only then
    found = read(WandbRun, run.wandb, PATIENCE_S)
    if isinstance(found, Unreadable):
        leave(f"{found}: delete the file to start a second W&B run for this run")
    known = found if isinstance(found, WandbRun) else WandbRun(secrets.token_hex(8))
    write(run.wandb, known)  # before W&B learns the id
    shutil.rmtree(run.wandb_files, ignore_errors=True)  # files of an earlier attempt, which this one repeats
    at_wandb = known.url is not None
    fork = if_readable(read(Fork, run.fork))
    try:
        wandb_run = wandb.init(
            id=known.id,
            resume="allow" if asked.mode == "online" else None,
            name=None if at_wandb else run.root.resolve().name,  # the user may have renamed it at W&B
            project=asked.project,
            entity=asked.entity,
            group=asked.group,
            tags=None if at_wandb else asked.tags,
            mode=asked.mode,
            dir=str(run.root),
            config=recipe | ({"fork": {"from": fork.source, "step": fork.step}} if fork else {}),
            settings=wandb.Settings(
                console="off",  # logs/ has the output of every rank
                disable_git=True,  # the running code is the snapshot, not the current directory
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,  # they would show one node of many
            ),
        )
    except wandb.Error as error:
        leave(" ".join(str(error).split()))
    write(run.wandb, known._replace(url=wandb_run.url))
    record = RecordReader(run, attempt)
    outcome = None
    while True:
        ended = over.is_set()  # checked before reading the record, which is then complete
        if ended:
            left = if_readable(read(Outcome, attempt.outcome))
            outcome = left and left.outcome
        for row in record.rows(complete=outcome == FINISHED):
            if row.step >= wandb_run.starting_step:
                wandb_run.log(row.values | ({"_timestamp": row.at} if row.at else {}), step=row.step)
        if ended:
            break
        over.wait(POLL_S)
    if outcome == DRAINED:
        wandb_run.mark_preempting()  # W&B then shows the run as preempted instead of failed
    wandb_run.finish(exit_code=0 if outcome == FINISHED else 1)


def end_in_time(life_line: int | None, limit_s: float, over: threading.Event) -> None:
    """Set `over` once the record is complete, as its writer says or dies; end this process `limit_s` later.

    life_line: descriptor of a pipe that then ends; None: the record is complete.
    """
    if life_line is not None:
        os.read(life_line, 1)
    over.set()
    time.sleep(limit_s)
    leave(f"W&B took longer than {limit_s:g} s to take the last steps")


def leave(why: str) -> NoReturn:
    """End this process at once, without wandb's exit hooks. wandb's helper process, wandb-core, notices and follows.

    why: one line; rank 0 logs the last line of this process.
    """
    sys.stderr.write(why + "\n")
    os._exit(EXIT_CRASHED)  # a regular exit runs wandb's hooks, which may wait for a network that is gone


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.rank.metrics.wandb.upload", description="Upload the record of a run to W&B."
    )
    parser.add_argument("run_dir", type=Path, help="run directory whose resolved.yaml has logging.wandb")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for the upload after the record is complete"
    )
    parser.add_argument("--until", type=int, help="descriptor of a pipe that ends with the run; default: it has ended")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a step, but meant for the ranks
    for name in [name for name in os.environ if name.startswith("WANDB_") and name not in USER_VARIABLES]:
        del os.environ[name]
    os.environ |= ENVIRONMENT
    run = RunDir(options.run_dir)
    attempt, over = run.attempt(run.last_attempt()), threading.Event()
    threading.Thread(target=end_in_time, args=(options.until, options.limit, over), daemon=True).start()
    upload(run, attempt, over)


if __name__ == "__main__":
    main()
