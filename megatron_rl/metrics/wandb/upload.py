"""The record of a run, told to Weights & Biases:

    python -P -m megatron_rl.metrics.wandb.upload RUN_DIR </dev/null

Started by mirror.py beside the run; by hand it tells what W&B missed of one that has ended. The end of standard input
says that the record is complete, and so does the death of the process that started this one.

A run goes on from a checkpoint, so steps that W&B was told of before a crash are run again. But the history of a W&B
run only grows: resumed, it drops a step that is not beyond its last one (docs.wandb.ai/models/support/
seeing_fewer_data_points_logged); rewinding it (`resume_from`) is a preview that a server of one's own lacks; and that
beginning again under an old id replaces its history is nowhere promised (github.com/wandb/wandb/issues/1450, 3424,
6216). So the run is resumed, W&B says which step it has come to, and is told the record from there on: each step once,
those included that an earlier attempt could not send or that a fork has from its source. Of a step that was run twice
W&B keeps the first value, metrics.jsonl the last; they differ where `resume.partial` or the device lets them.

Offline nobody is there to ask. Then every attempt writes the whole record anew, in the place of the one before.
"""

from __future__ import annotations

import argparse
import os
import secrets
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import yaml

from megatron_rl.config import RunConfig
from megatron_rl.contract.attempt_records import MetricsLine, Outcome, TimelineLine
from megatron_rl.contract.codes import DRAINED, EXIT_CRASHED, FINISHED
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import Unreadable, decode_lines, if_readable, read, read_lines, write
from megatron_rl.contract.run_records import Fork, WandbRun

Line = TypeVar("Line", MetricsLine, TimelineLine)

LOOK_EVERY_S = 5.0
PATIENCE_S = 30.0
ENVIRONMENT = {"WANDB_ERROR_REPORTING": "false", "WANDB_SHOW_INFO": "false"}
"""No telemetry of its own, from nodes that may reach nobody; in the log what went wrong, and nothing else."""
OF_THE_USER = frozenset(
    f"WANDB_{name}"
    for line in (
        "API_KEY IDENTITY_TOKEN_FILE CREDENTIALS_FILE ENTITY USERNAME USER_EMAIL",
        "BASE_URL APP_URL HTTP_PROXY HTTPS_PROXY X_PROXIES X_EXTRA_HTTP_HEADERS INSECURE_DISABLE_SSL",
        "HTTP_TIMEOUT INIT_TIMEOUT X_FILE_STREAM_TIMEOUT_SECONDS X_GRAPHQL_TIMEOUT_SECONDS",
        "CONFIG_DIR CACHE_DIR DATA_DIR ARTIFACT_DIR DEBUG CORE_DEBUG X_LOG_LEVEL",
    )
    for name in line.split()
)
"""Variables that wandb may read: who is logged in, and how to reach the server from here. wandb reads a variable for
each of its settings, and those that are about one run would bend this one: WANDB_SWEEP_ID of an agent's shell gives
every attempt another id, WANDB_RESUME_FROM begins it elsewhere, WANDB_DISABLED drops it."""


class RecordRow(NamedTuple):
    step: int
    at: float | None
    """Unix time of the step, where it is known."""
    values: dict[str, float]


class Tail(Generic[Line]):
    """The lines of a JSON-lines file that grows, each once; without those that a full disk tore, which are written
    again."""

    def __init__(self, kind: type[Line], path: Path) -> None:
        self._kind: type[Line] = kind
        self._path = path
        self._read = 0

    def new(self) -> list[Line]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return decode_lines(self._kind, whole).records


class RecordReader:
    """Rows of the record, one a step, each once and in order."""

    def __init__(self, run: RunDir, attempt: Attempt) -> None:
        self._steps = Tail(MetricsLine, run.metrics)
        self._evaluations = Tail(MetricsLine, run.evaluations)
        self._timeline = Tail(TimelineLine, attempt.timeline)
        self._at: dict[int, float] = {}
        for number in range(1, attempt.number):
            lines = read_lines(TimelineLine, run.attempt(number).timeline)
            if not isinstance(lines, Unreadable):  # its steps are shown without their time
                self._at |= times(lines.records)
        self._rows: dict[int, dict[str, float]] = {}
        self._newest = -1

    def rows(self, *, complete: bool) -> list[RecordRow]:
        """What is new. Unless the record is complete the last step is held back: its evaluation may be to come, in
        the next attempt perhaps."""
        # In this order: the evaluation of a step is written before the step that follows.
        steps, evaluations = self._steps.new(), self._evaluations.new()
        for line in [*steps, *evaluations]:
            self._rows.setdefault(line.step, {}).update(numbers(line.values))
        self._newest = max([self._newest, *(line.step for line in steps)])
        self._at |= times(self._timeline.new())
        ready = sorted(step for step in self._rows if complete or step < self._newest)
        return [RecordRow(step, self._at.get(step), self._rows.pop(step)) for step in ready]


def numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """What of a line can be drawn, under the names of metrics/names.py."""
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def times(lines: Iterable[TimelineLine]) -> dict[int, float]:
    """{step: when it was done}; the line after a load is about the step that was gone on from."""
    return {line.step: line.at for line in lines if line.resumed is None}


def upload(run: RunDir, attempt: Attempt, over: threading.Event) -> None:
    """Tell W&B the record until `over` says that it is complete. Where W&B refuses, this process ends."""
    import wandb  # a second to import, and a process that is not asked for must not need it

    recipe = yaml.safe_load(run.resolved.read_text(encoding="utf-8"))
    asked = RunConfig.model_validate(recipe).logging.wandb
    assert asked is not None  # or nobody would have started this
    found = read(WandbRun, run.wandb, PATIENCE_S)
    if isinstance(found, Unreadable):
        leave(f"{found}: to begin a second W&B run for this one is not for me to decide")
    known = found if isinstance(found, WandbRun) else WandbRun(secrets.token_hex(8))
    write(run.wandb, known)  # before W&B hears of it
    shutil.rmtree(run.wandb_files, ignore_errors=True)  # an earlier attempt's, which this one repeats
    at_wandb = known.url is not None
    fork = if_readable(read(Fork, run.fork))
    try:
        wandb_run = wandb.init(
            id=known.id,
            resume="allow" if asked.mode == "online" else None,
            name=None if at_wandb else run.root.resolve().name,  # somebody may have changed it there
            project=asked.project,
            entity=asked.entity,
            group=asked.group,
            tags=None if at_wandb else asked.tags,
            mode=asked.mode,
            dir=str(run.root),
            config=recipe | ({"fork": {"from": fork.source, "step": fork.step}} if fork else {}),
            settings=wandb.Settings(
                console="off",  # logs/ has it, of every rank
                disable_git=True,  # the code that runs is the snapshot, not the current directory
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,  # one node of many would stand for all
            ),
        )
    except wandb.Error as error:
        leave(" ".join(str(error).split()))
    write(run.wandb, known._replace(url=wandb_run.url))
    record = RecordReader(run, attempt)
    outcome = None
    while True:
        ended = over.is_set()  # before the look at the record, which then holds all there is
        if ended:
            left = if_readable(read(Outcome, attempt.outcome))
            outcome = left and left.outcome
        for row in record.rows(complete=outcome == FINISHED):
            if row.step >= wandb_run.starting_step:
                at = {"_timestamp": row.at} if row.at else {}
                wandb_run.log(row.values | at, step=row.step)
        if ended:
            break
        over.wait(LOOK_EVERY_S)
    if outcome == DRAINED:
        wandb_run.mark_preempting()  # shown as preempted then, and not as failed
    wandb_run.finish(exit_code=0 if outcome == FINISHED else 1)


def end_in_time(owner: int, limit_s: float, over: threading.Event) -> None:
    """Set `over` once the record is complete or `owner`, who writes it, is gone; `limit_s` later, end this process."""
    while os.getppid() == owner and not select.select([sys.stdin], [], [], 1.0)[0]:
        pass
    over.set()
    time.sleep(limit_s)
    leave(f"W&B took longer than {limit_s:g} s to take the last steps")


def leave(why: str) -> NoReturn:
    """End this process at once, without wandb's exit hooks. Its helper, wandb-core, looks whether it is there and
    follows.

    Args:
        why: one line; the last one of the log is said in that of the rank.
    """
    sys.stderr.write(why + "\n")
    os._exit(EXIT_CRASHED)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.metrics.wandb.upload", description="Tell W&B of a run."
    )
    parser.add_argument("run_dir", type=Path, help="whose resolved.yaml has logging.wandb")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for what is left when the record is complete"
    )
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks, and sent to all processes of a step
    for name in [name for name in os.environ if name.startswith("WANDB_") and name not in OF_THE_USER]:
        del os.environ[name]
    os.environ |= ENVIRONMENT
    run = RunDir(options.run_dir)
    over = threading.Event()
    threading.Thread(target=end_in_time, args=(os.getppid(), options.limit, over), daemon=True).start()
    upload(run, run.attempt(run.last_attempt()), over)


if __name__ == "__main__":
    main()
