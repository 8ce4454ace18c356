"""GRPO training of one run, on one rank:

    python -m megatron_rl.train_rl --run-dir RUN_DIR --attempt N

Started once per rank by the launcher, with RANK, WORLD_SIZE and LOCAL_RANK in the environment. Exit codes and
files are named in run_dir.py: 0 finished, 75 saved and left on request, 78 bad configuration, else a crash.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import yaml
from pydantic import ValidationError

from megatron_rl.checkpoint.publish import find_latest
from megatron_rl.checkpoint.save import Checkpointer, Published
from megatron_rl.checkpoint.save import Outcome as SaveOutcome
from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.metrics.report import StepReport
from megatron_rl.metrics.sinks import MetricsWriter, NoRecord
from megatron_rl.platform import select
from megatron_rl.run_dir import EXIT_CONFIG, EXIT_CRASHED, EXIT_DRAINED, EXIT_FINISHED, Attempt, RunDir, write_json
from megatron_rl.supported import check_supported
from megatron_rl.training.drain import Drain
from megatron_rl.training.progress import Progress
from megatron_rl.training.setup import Run, set_up
from megatron_rl.training.world import World, die_with_parent

logger = logging.getLogger("megatron_rl")

Outcome = Literal["finished", "drained"]


def train(run: Run, checkpointer: Checkpointer, record: MetricsWriter, progress: Progress, drain: Drain) -> Outcome:
    """The loop: generate and score, train, evaluate, record, save; to the last step or until asked to leave."""
    config = run.config
    if run.step == 0:
        progress.enter("evaluating", 0)
        record.evaluation(0, run.evaluate())

    while run.step < config.training.steps:
        if drain.agreed(run.group, run.platform.device):
            return "drained"
        run.step += 1
        progress.enter("training", run.step)
        report = StepReport(run.step)

        with report.phase("generate"):
            batch = run.driver.collect(run.next_ordinal)
        with report.phase("train"):
            updates = run.trainer.train(batch, run.step, report.tally)
        # The engine reads the training weights where they are: all its refit takes is to know their version.
        run.engine.policy_version = run.trainer.policy_version
        run.next_ordinal = batch.next_ordinal

        if due(run.step, config.evaluation.every, config.training.steps):
            progress.enter("evaluating", run.step)
            with report.phase("evaluate"):
                record.evaluation(run.step, run.evaluate())
        metrics = report.metrics(batch, updates, run.trainer.policy_version, run.group, run.platform.device)
        record.step(run.step, metrics | save_metrics(checkpointer.poll()))
        record.look(run.step, batch.groups)
        if due(run.step, config.save.every, config.training.steps):
            save(run, checkpointer, record)
    return "finished"


def due(step: int, every: int, last: int) -> bool:
    return step == last or (every > 0 and step % every == 0)


def save(run: Run, checkpointer: Checkpointer, record: MetricsWriter) -> None:
    """Start a checkpoint of the current step; it is written behind the following steps."""
    record.sync()
    checkpointer.save(run.step, run.sharded_state(loading=False), run.progress())


def save_metrics(outcomes: Sequence[SaveOutcome]) -> dict[str, float]:
    """What became of the checkpoints begun in earlier steps. One that failed is said and counted, no more: the
    one before it is untouched."""
    metrics: dict[str, float] = {}
    for outcome in outcomes:
        if isinstance(outcome, Published):
            logger.info("checkpoint of step %d published, %d bytes", outcome.step, outcome.bytes)
            metrics |= {"time/save_blocked_s": outcome.blocked_s, "time/save_s": outcome.total_s}
        else:
            logger.warning("%s", outcome)
            metrics["system/failed_saves"] = metrics.get("system/failed_saves", 0) + 1
    return metrics


def agree_on_checkpoint(run_dir: RunDir, rank: int) -> int | None:
    """Step of the newest good checkpoint, as rank 0 sees it: caches of a network file system differ. Collective."""
    found: list[int | None] = [None]
    if rank == 0:
        latest = find_latest(run_dir)
        for line in latest.passed_over:
            logger.warning(line)
        found = [latest.step]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def run_rank(run_dir: RunDir, attempt: Attempt, world: World, progress: Progress) -> Outcome:
    """Everything between start and exit of a rank."""
    drain = Drain()
    drain.listen()
    config = RunConfig.model_validate(yaml.safe_load(run_dir.resolved.read_text(encoding="utf-8")))
    check_supported(config)
    platform = select(config.job, world.local_rank)
    group = world.connect(config.job, platform.backend, attempt.address("train"))
    checkpointer = Checkpointer(run_dir, config.save)
    if config.model.init == "supervised":
        progress.enter("teaching the base model", 0)
    run = set_up(config, platform, group)
    last_step = agree_on_checkpoint(run_dir, world.rank)
    if last_step is not None:
        progress.enter("loading the checkpoint", last_step)
        run.restore(run_dir.checkpoint(last_step))
        logger.info("going on after step %d", last_step)
    record = MetricsWriter(run_dir, config.logging, last_step) if world.rank == 0 else NoRecord()

    outcome = train(run, checkpointer, record, progress, drain)
    progress.enter("saving", run.step)
    if outcome == "drained" and run.step > 0:
        save(run, checkpointer, record)
    checkpointer.wait(final=True)
    record.close()
    if world.rank == 0:
        write_json(attempt.outcome, {"outcome": outcome, "step": run.step})
    dist.barrier(group)  # nobody leaves before the outcome is on disk
    world.disconnect()
    return outcome


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
    progress = Progress(attempt, shared=world.rank == 0)
    try:
        outcome = run_rank(run_dir, attempt, world, progress)
    except Exception as error:  # noqa: BLE001 - the one place that turns any failure into an error file
        _leave(attempt, world, progress, error)
    sys.exit(EXIT_FINISHED if outcome == "finished" else EXIT_DRAINED)


def _leave(attempt: Attempt, world: World, progress: Progress, error: Exception) -> None:
    """Say what happened where, then exit without another word to the other ranks."""
    misconfigured = isinstance(error, ConfigurationError | ValidationError)  # its message is all the user needs
    trace = "" if misconfigured else "".join(traceback.format_exception(error))
    said = f"{type(error).__name__}: {error}"
    summary = said if misconfigured else said.partition("\n")[0]
    logger.error("rank %d failed in step %d (%s): %s\n%s", world.rank, progress.step, progress.phase, summary, trace)
    code = EXIT_CONFIG if misconfigured else EXIT_CRASHED
    fields: dict[str, Any] = {
        "rank": world.rank,
        "host": socket.gethostname(),
        "step": progress.step,
        "phase": progress.phase,
        "error": summary,
        "traceback": trace,
        "exit_code": code,
    }
    write_json(attempt.error(world.rank), fields)
    logging.shutdown()
    # A normal exit would wait for collectives that the other ranks will never join.
    os._exit(code)


if __name__ == "__main__":
    main()
