"""Entry point of each training rank:

    python -m megatron_rl.rank_main --run-dir RUN_DIR --attempt N

The launcher starts it once per rank, with RANK, WORLD_SIZE and LOCAL_RANK in the environment, or Slurm's variables.
Exit codes are those of contract/codes.py: finished, drained (saved and left on request), bad configuration; all others
are crashes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.entry import Work, run_rank
from megatron_rl.rank.world import World, die_with_parent


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron_rl.rank_main", description="One rank of a GRPO run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="directory prepared by mrl-submit")
    parser.add_argument("--attempt", type=int, required=True, help="number of this start of the ranks, from 1")
    options = parser.parse_args(arguments)
    die_with_parent()
    world = World.from_environment()
    run_dir = RunDir(options.run_dir)
    attempt = run_dir.attempt(options.attempt)

    def load() -> Work:
        from megatron_rl.model.platform.implementation import choose_implementation
        from megatron_rl.recipe.config import read_config

        config = read_config(run_dir)
        choose_implementation(config)  # before the imports below import megatron-core
        if run_dir.evaluation_request.exists():
            from megatron_rl.run.evaluate.evaluation_attempt import run_evaluation

            return partial(run_evaluation, run_dir, attempt, world)
        from megatron_rl.run.attempt import run_attempt

        return partial(run_attempt, run_dir, attempt, world)

    run_rank(attempt, world, load)


if __name__ == "__main__":
    main()
