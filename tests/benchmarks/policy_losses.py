"""Processor seconds of a training step with each policy loss, entropy bonus and importance weight, beside `clip`.

    python tests/benchmarks/policy_losses.py [--rounds 30] [--answers 256] [--tokens 24] [--only NAME ...]

One process on one thread trains the demo's model on recorded answers, again and again on the same ones. A loss is
compared with the steps of `clip` right before and after its own: a pair is clip, loss, loss, clip, so that a drift of
the machine's speed cancels. The table has the median of the pairs and a 95 % interval of that median; `clip again`, the
same loss in a trainer of its own, shows how exact the method is. A step is a whole `Trainer.train`: packing, forward,
loss, backward, Adam. The smaller the model, the more the loss counts in it. With one thread, processor time is the time
of a step on an idle machine.

Rewards are all different: with `clip` a step leaves out answers without advantage, with an entropy bonus it cannot.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
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
from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.platform.select import select
from megatron_rl.rank.groups import Groups
from megatron_rl.training.trainer import Trainer

BASE = "clip"
CASES: dict[str, dict[str, Any]] = {
    BASE: {},
    "clip again": {},
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
    parser.add_argument("--rounds", type=int, default=30, help="pairs for each loss (default: 30)")
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=24, help="longest answer; the demo's model holds 32 with its prompt"
    )
    parser.add_argument("--only", choices=CASES, nargs="+", default=list(CASES), metavar="NAME")
    given = parser.parse_args()
    torch.set_num_threads(1)
    platform = select(tiny_run().job)
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    groups = Groups.from_megatron(timedelta(seconds=60))
    trainers = trainers_of(platform, groups, given.answers)
    recorded = answers_of(given.answers // 16, given.tokens)
    compared = [name for name in given.only if name != BASE]

    def step(name: str, number: int) -> float:
        began = time.process_time()
        trainers[name].train(batch_of(recorded, 0, len(recorded)), number)
        return time.process_time() - began

    base: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    ratios: dict[str, list[float]] = {name: [] for name in compared}
    for name in (BASE, *compared):  # the first step touches memory for the first time
        step(name, 1)
    gc.disable()
    for number in range(given.rounds):
        for name in random.Random(number).sample(compared, len(compared)):
            before, one, other, after = (step(each, number + 2) for each in (BASE, name, name, BASE))
            base += [before, after]
            seconds[name] += [one, other]
            ratios[name].append((one + other) / (before + after))
        gc.collect()
    sys.stdout.write("| loss | step, s | beside clip | 95 % interval |\n|---|---|---|---|\n")
    sys.stdout.write(f"| {BASE} | {median(base):.3f} | | |\n")
    for name, its in seconds.items():
        low, high = interval(ratios[name])
        sys.stdout.write(f"| {name} | {median(its):.3f} | {median(ratios[name]):.3f} | {low:.3f} to {high:.3f} |\n")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Bounds of the median with 95 % confidence, whatever the distribution of the values: two of them."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low = max(0, int(len(ordered) / 2 - half))
    return ordered[low], ordered[-1 - low]


def answers_of(groups: int, longest: int) -> list[TrajectoryGroup]:
    """Recorded groups of 16 answers, no two of which have the same reward."""
    draw = random.Random(1)
    return [
        replace(group, trajectories=[replace(each, reward=draw.random()) for each in group.trajectories])
        for group in random_groups(groups, 16, longest=longest)
    ]


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
