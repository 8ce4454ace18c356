"""Processor seconds of a training step with each policy loss, entropy bonus and importance weight, beside `clip`.

    python tests/benchmarks/policy_losses.py [--rounds 15] [--answers 256] [--tokens 24]

One process on one thread trains the demo's model on recorded answers, again and again on the same ones. The losses take
turns, in another order in each round, and are compared within a round. A step is a whole `Trainer.train`: packing,
forward, loss, backward, Adam. The smaller the model, the more the loss counts in it. With one thread, processor time is
the time of a step on an idle machine, and other work on the machine changes it little.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
import torch
import torch.distributed as dist
from core_helpers import batch_of, build_run, random_groups, tiny_run
from megatron.core import parallel_state

from launcher.recipe.load import load_recipe
from megatron_rl.platform.select import select
from megatron_rl.rank.groups import Groups
from megatron_rl.training.trainer import Trainer

CASES: dict[str, dict[str, Any]] = {
    "clip": {},
    "dual_clip": {"dual_clip": 3.0},
    "gspo": {"policy_loss": "gspo"},
    "gspo_token": {"policy_loss": "gspo_token"},
    "cispo": {"policy_loss": "cispo"},
    "sapo": {"policy_loss": "sapo"},
    "dppo": {"policy_loss": "dppo"},
    "dppo by kl": {"policy_loss": "dppo", "dppo_divergence": "kl"},
    "reinforce": {"policy_loss": "reinforce"},
    "reduction: constant": {"reduction": "constant"},
    "importance of tokens": {"importance": {"upper": 2.0}},
    "importance of answers": {"importance": {"level": "sequence", "upper": 2.0}},
    "entropy bonus": {"entropy_coefficient": 1e-3},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=24, help="longest answer; the demo's model holds 32 with its prompt"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    platform = select(tiny_run().job)
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    groups = Groups.from_megatron(timedelta(seconds=60))
    trainers = trainers_of(platform, groups, given.answers)
    recorded = random_groups(given.answers // 16, 16, longest=given.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for number in range(given.rounds + 1):
        order = random.Random(number).sample(list(trainers), len(trainers))
        for name in order:
            began = time.process_time()
            trainers[name].train(batch_of(recorded, 0, len(recorded)), number + 1)
            if number:  # the first round touches memory for the first time
                seconds[name].append(time.process_time() - began)
    base = seconds["clip"]
    sys.stdout.write("| loss | step, s | beside clip | middle half |\n|---|---|---|---|\n")
    for name, its in seconds.items():
        ratios = sorted(one / of_clip for one, of_clip in zip(its, base, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        sys.stdout.write(f"| {name} | {median(its):.3f} | {median(ratios):.3f} | {low:.3f} to {high:.3f} |\n")


def trainers_of(platform: Any, groups: Groups, answers: int) -> dict[str, Trainer]:
    """A trainer for each case, all of the same model and optimizer."""
    model = load_recipe("demo").config.model.model_dump() | {"init": "from-scratch"}

    def recipe(keys: dict[str, Any]) -> Any:
        return tiny_run(
            model=model,
            grpo={"prompts_per_step": answers // 16, "group_size": 16, **keys},
            training={"tokens_per_microbatch": 16_384},
            optimizer={"learning_rate": 1e-12},  # so that the ratios stay those of the first step
        )

    run = build_run(recipe({}), platform, groups)
    models = run.models
    return {
        name: Trainer(models.policy, models.optimizer, None, recipe(keys), platform, groups, run.safe_points)
        for name, keys in CASES.items()
    }


if __name__ == "__main__":
    main()
