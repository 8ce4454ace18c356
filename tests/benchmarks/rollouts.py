"""Cost of a rollout without the model: from prompts to a batch, with an engine that answers at once.

    python tests/benchmarks/rollouts.py [--answers 100000] [--problems 1000000]

Driver, bank, agents and environment (arithmetic) are a run's; its problems are repeated up to --problems. Memory is the
resident size of the process after a tenth of the answers and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from megatron_rl.agent.environments.arithmetic import ArithmeticEnvironment
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.api import Completion, GenerationRequest, PartialAnswer
from megatron_rl.learn.rollout.agent_loop import EngineInTurn
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.bank.records import Lineage
from megatron_rl.learn.rollout.curriculum import prompts_of
from megatron_rl.learn.rollout.driver import RolloutDriver
from megatron_rl.learn.rollout.in_flight import InFlightGroups
from megatron_rl.learn.rollout.window import Window
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.run.problems import choose_problems

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from core_helpers import here_of, quiet_safe_points, tiny_run

PROMPTS, GROUP = 64, 16
TOKENS = 64


class NullEngine:
    """Implements `RankEngine` with an immediate, constant answer."""

    policy_version = 0
    busy_s = 0.0
    policy: Any = None

    def __init__(self) -> None:
        self._answer = Completion([1] * TOKENS, [-0.5] * TOKENS, "length", [0] * TOKENS)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        await asyncio.sleep(0)
        return [self._answer] * request.num_samples

    def partial_answers(self) -> list[PartialAnswer]:
        return []

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        raise AssertionError("it is one rank")

    def release_followers(self) -> None:
        """No-op: there are no other ranks."""

    def end_phase(self) -> None:
        """No-op: there is no cache."""


class ManyProblems(ArithmeticEnvironment):
    count = 0

    def training_problems(self) -> Sequence[Problem]:
        few = [*super().training_problems()]
        return [few[number % len(few)] for number in range(self.count)]


def driver(max_lag: int, environment: ManyProblems, folder: Path, answers: int) -> RolloutDriver:
    config = tiny_run(
        grpo={"prompts_per_step": PROMPTS, "group_size": GROUP},
        training={"steps": answers // (PROMPTS * GROUP) + 1},
        **{"async": {"max_lag": max_lag}},
    )
    groups: Any = SimpleNamespace(control=dist.group.WORLD, data=dist.group.WORLD)
    role: Any = SimpleNamespace(index=0, count=1, drives=True)
    sets, _ = choose_problems(environment, config, environment.tokenizer)
    engine, safe_points = NullEngine(), quiet_safe_points()
    bank = Bank(folder, config.resume, Lineage("run", 1, 0, 0, "r"), next_ordinal=0, driver=0, drivers=1)
    loop = EngineInTurn(role, engine, safe_points)
    prompts = prompts_of(config, sets)
    in_flight = InFlightGroups(environment, prompts.problem, engine, bank, config)
    return RolloutDriver(prompts, Window.of(config), loop, in_flight, config, here_of(None, groups, safe_points))


def memory_mib() -> float:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--problems", type=int, default=1_000_000)
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = tiny_run()
    tokenizer = build_tokenizer(config.tokenizer)
    environment = ManyProblems(ManyProblems.Config(**config.environment.args), tokenizer)
    environment.count = options.problems
    steps = options.answers // (PROMPTS * GROUP)
    print(f"{'':10}{'first batch, s':>16}{'answers/s':>12}{'memory, MiB':>14}{'at the end':>12}")
    for max_lag in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            made = driver(max_lag, environment, Path(folder), options.answers)
            batch = made.collect(0)
            first_s, began, then = time.perf_counter() - began, time.perf_counter(), 0.0
            for step in range(1, steps):
                batch = made.collect(batch.next_ordinal)
                made.begin_checkpoint(step, batch.next_ordinal)
                made.end_checkpoint(step)
                if step == steps // 10:
                    then = memory_mib()
            seconds = time.perf_counter() - began
            rate = (steps - 1) * PROMPTS * GROUP / seconds
            print(f"{f'lag {max_lag}':10}{first_s:16.2f}{rate:12,.0f}{then:14.0f}{memory_mib():12.0f}", flush=True)
            made.stop()
            made.close()


if __name__ == "__main__":
    main()
