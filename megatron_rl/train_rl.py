"""GRPO training of one run, on one rank:

    python -m megatron_rl.train_rl --run-dir RUN_DIR --attempt N

Started once per rank by the launcher, with RANK, WORLD_SIZE and LOCAL_RANK in the environment. Exit codes and
files are named in run_dir.py: 0 finished, 75 saved and left on request, 78 bad configuration, else a crash.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import yaml
from pydantic import ValidationError

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.save import Checkpointer, Published
from megatron_rl.checkpoint.save import Outcome as SaveOutcome
from megatron_rl.checkpoint.schedule import SaveSchedule
from megatron_rl.config import RunConfig
from megatron_rl.contract.codes import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DRAINED,
    EXIT_FINISHED,
    KILLED_TOO_S,
    OUTCOME_PATIENCE_S,
)
from megatron_rl.contract.files import once_there_is_room
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.leaving import finish, leave
from megatron_rl.metrics.report import StepReport
from megatron_rl.metrics.tally import Tally
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.metrics.wandb.mirror import check_installed
from megatron_rl.metrics.writer import MetricsWriter, NoRecord
from megatron_rl.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.black_box import BlackBox
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.safe_points import LOOK_EVERY_S, LeaveAgreed, SafePoints
from megatron_rl.rank.world import World, die_with_parent
from megatron_rl.rollout.bank.bank import open_bank
from megatron_rl.run import Run, set_up
from megatron_rl.run_dir import write_json
from megatron_rl.supported import check_supported

logger = logging.getLogger("megatron_rl")

Outcome = Literal["finished", "drained"]

EXIT_CODES: dict[Outcome, int] = {"finished": EXIT_FINISHED, "drained": EXIT_DRAINED}


def train(run: Run, checkpointer: Checkpointer, record: MetricsWriter, safe_points: SafePoints) -> Outcome:
    """The loop: evaluate and save where it is time to, then train a step; to the last one or until asked to leave."""
    config = run.config
    last = config.training.steps
    schedule = SaveSchedule(checkpointer, run.step, last)
    try:
        while True:
            if run.evaluated < run.step and due(run.step, config.evaluation.every, last):
                evaluate(run, record, safe_points)
            if run.saved < run.step and schedule.due(run.step):
                save(run, checkpointer, record, safe_points)
            if run.step == last:
                return "finished"
            train_step(run, checkpointer, record, safe_points)
    except LeaveAgreed:
        return "drained"


def train_step(run: Run, checkpointer: Checkpointer, record: MetricsWriter, safe_points: SafePoints) -> None:
    """Generate and score, train, record. Raises LeaveAgreed with the run as it was after the step before, unless
    `run.trainer.between_steps` is false."""
    step = run.step + 1
    safe_points.activity.enter("training", step)

    batch = run.driver.collect(run.next_ordinal)
    stats = run.trainer.train(batch, step)
    with safe_points.phase("refit"):
        # The engine reads the training weights where they are: all its refit takes is to know their version.
        run.engine.policy_version = run.trainer.policy_version
    run.step, run.next_ordinal = step, batch.next_ordinal

    report = StepReport(
        step=step,
        stats=stats,
        generation_rounds=batch.rounds,
        first_ordinal=batch.first_ordinal,
        next_ordinal=batch.next_ordinal,
        policy_version=run.trainer.policy_version,
        dropped=batch.dropped,
        failures=batch.failures,
    )
    metrics, stretch = report.lines(safe_points.timeline, run.groups.control)
    record.step(step, metrics | save_metrics(run, checkpointer.poll()))
    record.stretch(stretch)
    record.look(step, batch.groups)


def evaluate(run: Run, record: MetricsWriter, safe_points: SafePoints) -> None:
    safe_points.activity.enter("evaluating", run.step)
    with safe_points.phase("evaluate"):
        record.evaluation(run.step, run.evaluate())
    run.evaluated = run.step


def due(step: int, every: int, last: int) -> bool:
    return step in (0, last) or (every > 0 and step % every == 0)


def save(run: Run, checkpointer: Checkpointer, record: MetricsWriter, safe_points: SafePoints) -> None:
    """Start a checkpoint of the current step; it is written behind the following steps. Where the one before is not
    done yet, LeaveAgreed may come before."""
    with safe_points.phase("save"):
        while checkpointer.under_way is not None and not safe_points.poll():
            checkpointer.wait(until=time.monotonic() + LOOK_EVERY_S)
        safe_points.agree()
        begin_save(run, checkpointer, record)


def begin_save(run: Run, checkpointer: Checkpointer, record: MetricsWriter) -> None:
    """Blocks for the copy."""
    record.sync()
    run.driver.bank.saving(run.step, run.next_ordinal)
    checkpointer.save(run.step, run.sharded_state(), run.progress())
    run.saved = run.step


def save_metrics(run: Run, outcomes: Sequence[SaveOutcome]) -> dict[str, float]:
    """What became of the checkpoints begun in earlier steps. One that failed is said and counted, no more: the
    one before it is untouched."""
    metrics: dict[str, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, Published):
            logger.info("checkpoint of step %d published, %d bytes", outcome.step, outcome.bytes)
            run.driver.bank.saved(outcome.step)
            metrics |= {"time/save_blocked_s": outcome.blocked_s, "time/save_s": outcome.total_s}
        else:
            logger.warning("%s", outcome)
            metrics["system/failed_saves"] = metrics.get("system/failed_saves", 0) + 1
    return metrics


def book(run: Run, record: MetricsWriter, **facts: Any) -> None:
    """Write what passed since the last line of the attempt's timeline. Collective."""
    tally = Tally()
    run.safe_points.timeline.tally(tally)
    total = tally.reduce(run.groups.control)
    record.stretch({**run.safe_points.timeline.line(total, dist.get_world_size(run.groups.control), run.step), **facts})


def run_rank(run_dir: RunDir, attempt: Attempt, world: World, safe_points: SafePoints) -> Outcome:
    """Everything between start and exit of a rank."""
    activity = safe_points.activity
    config = RunConfig.model_validate(yaml.safe_load(run_dir.resolved.read_text(encoding="utf-8")))
    check_supported(config)
    check_installed(config.logging)
    platform = select(config.job, world.local_rank)
    groups = world.connect(config.job, platform.backend, attempt.address("train"))
    safe_points.connect(groups)
    safe_points.drain.started()
    try:
        checkpointer = Checkpointer(run_dir, config.save)
        if config.model.init == "supervised":
            activity.enter("teaching the base model", 0)
        run = set_up(config, platform, groups, safe_points)
    except LeaveAgreed:
        return leave_early(attempt, world, safe_points.drain)
    except RuntimeError:
        # A request that comes while the ranks meet may find one that has not met the others yet. It leaves by itself,
        # and the connection to it is lost.
        if not (safe_points.drain.asked or attempt.outcome in attempt.folder.iterdir()):
            raise
        return leave_early(attempt, world, safe_points.drain)
    activity.enter("loading the checkpoint", 0)
    with safe_points.timeline.phase("load"):
        if checkpointer.restore(run.restore) is not None:
            logger.info("going on after step %d", run.step)
    record = MetricsWriter(run_dir, attempt, config.logging, run.step, run.evaluated) if world.rank == 0 else NoRecord()
    run.driver.bank = open_bank(
        run_dir, attempt.number, config, run.engine, groups, step=run.step, next_ordinal=run.next_ordinal
    )
    book(run, record, resumed=run.step)

    safe_points.timeline.switch("train")
    outcome = train(run, checkpointer, record, safe_points)
    activity.enter("saving", run.step)
    if outcome == "finished":
        with safe_points.phase("save"):
            finish(safe_points, checkpointer)
    else:
        with safe_points.phase("drain"):
            leave(run, run_dir, checkpointer, lambda: begin_save(run, checkpointer, record))
    save_metrics(run, checkpointer.poll())
    run.driver.bank.close()
    book(run, record)
    if world.rank == 0:
        step = run.step if outcome == "finished" else checkpointer.published
        once_there_is_room(attempt.outcome, lambda: write_json(attempt.outcome, {"outcome": outcome, "step": step}))
    record.close()
    dist.barrier(groups.control)  # nobody leaves before the outcome is on disk
    world.disconnect()
    return outcome


def leave_early(attempt: Attempt, world: World, drain: DrainListener) -> Outcome:
    """Leave before there is anything to save. Needs no other rank: each was told."""
    if world.rank == 0:
        drain.tell_host(rank=0)
        write_json(attempt.outcome, {"outcome": "drained", "step": None})
    give_up = time.monotonic() + OUTCOME_PATIENCE_S
    while attempt.outcome not in attempt.folder.iterdir() and time.monotonic() < give_up:
        time.sleep(0.1)
    return "drained"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.train_rl", description="One rank of a GRPO run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory prepared by mrl-submit")
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the ranks, from 1")
    options = parser.parse_args(arguments)
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)  # it prints its configuration and deprecations
    world = World.from_environment()
    run_dir = RunDir(options.run_dir)
    attempt = run_dir.attempt(options.attempt)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    activity = Activity(attempt, published=world.rank == 0)
    box = BlackBox(attempt, world.rank, world.size, activity)
    box.start()
    safe_points = SafePoints(activity, DrainListener(attempt), Timeline())
    safe_points.drain.listen(early=lambda: os._exit(EXIT_CODES[leave_early(attempt, world, safe_points.drain)]))
    try:
        outcome = run_rank(run_dir, attempt, world, safe_points)
    except Exception as error:  # noqa: BLE001 - the one place that turns any failure into an error file
        misconfigured = isinstance(error, ConfigurationError | ValidationError)
        code = EXIT_CONFIG if misconfigured else EXIT_CRASHED
        if safe_points.drain.asked:
            time.sleep(KILLED_TOO_S)  # what failed may be the connection to one that was killed: no crash to report
        box.report_failure(error, code)
        logging.shutdown()
        # A normal exit would wait for collectives that the other ranks will never join.
        os._exit(code)
    box.stop()
    gc.freeze()  # the interpreter would look for garbage in all that torch has made, for seconds, before it ends
    sys.exit(EXIT_CODES[outcome])


if __name__ == "__main__":
    main()
