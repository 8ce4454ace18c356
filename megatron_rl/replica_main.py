"""Entry point of each rank of a replica, which generates, or holds the teacher or the reward model:

    python -m megatron_rl.replica_main --run-dir RUN_DIR --attempt N --replica K | --teacher K | --reward K

The launcher starts it once per rank of the replica, with RANK, WORLD_SIZE and LOCAL_RANK in the environment, or Slurm's
variables, and with MRL_START, the number of earlier starts of this replica in this attempt. Exit codes are those of
contract/codes.py: finished (the run does not need it any more), drained, bad configuration; all others are crashes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_rl.contract.codes import START_VARIABLE
from megatron_rl.contract.paths import NUMBER_OPTIONS, REWARD, TEACHER, RunDir
from megatron_rl.rank.entry import Work, run_rank
from megatron_rl.rank.world import World, die_with_parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_rl.replica_main", description="One rank of a replica of a GRPO run."
    )
    parser.add_argument("--run-dir", type=Path, required=True, help="directory prepared by mrl-submit")
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the run, from 1")
    which = parser.add_mutually_exclusive_group(required=True)
    for kind, option in NUMBER_OPTIONS.items():
        which.add_argument(option, type=int, dest=kind, help=f"number of the replica {kind}-K, from 0")
    options = parser.parse_args(arguments)
    die_with_parent()
    world = World.from_environment()
    run_dir = RunDir(options.run_dir)
    (kind,) = (kind for kind in NUMBER_OPTIONS if getattr(options, kind) is not None)
    replica = run_dir.attempt(options.attempt).replica(getattr(options, kind), kind)
    start = int(os.environ.get(START_VARIABLE, "0"))

    def load() -> Work:
        from megatron_rl.generate.replica.lifecycle import run_start
        from megatron_rl.recipe.config import read_config

        config = read_config(run_dir)
        if kind == REWARD:
            from megatron_rl.generate.vllm.reward_model import open_reward_model as opened
        elif kind == TEACHER and config.teacher_vllm is not None:
            from megatron_rl.generate.vllm.teacher import open_teacher as opened
        elif kind == TEACHER:
            from megatron_rl.generate.replica.own_engine import open_teacher as opened
        elif config.inference.own_vllm is not None:
            from megatron_rl.generate.vllm.replica import open_policy as opened
        else:
            from megatron_rl.model.platform.implementation import choose_implementation

            choose_implementation(config)  # before megatron-core is imported
            from megatron_rl.generate.replica.own_engine import open_policy as opened
        return partial(run_start, opened, run_dir, replica, start, world)

    run_rank(replica, world, load, notifies_host=False)


if __name__ == "__main__":
    main()
