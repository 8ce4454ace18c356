"""Cost of the record of rollouts: processor time and bytes a step, beside the time that a step takes.

    python tests/benchmarks/rollout_record.py

Times ten steps, of which one is sampled (`logging.samples_every: 10`), with the flush that they share. The demo's share
of a rank, and that of one of eight replicas of qwen2.5-32b-dapo with answers of 4,000 tokens.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import torch

from megatron_rl.agent.trajectories import Problem, Trajectory, TrajectoryGroup
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.rollout_records import read_rollouts
from megatron_rl.inference.api import Completion
from megatron_rl.metrics.config import LoggingConfig
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.record import RolloutRecord

STEPS = 10
CASES = {
    "demo, one of two ranks": {"groups": 16, "answers": 16, "prompt": 4, "tokens": 2, "step_s": 0.115, "sampled": 2},
    "32B, one of eight replicas": {
        "groups": 64,
        "answers": 16,
        "prompt": 200,
        "tokens": 4000,
        "step_s": 300.0,
        "sampled": 1,
    },
}
"""Groups of a step on the rank, their answers, tokens of the prompt and of each answer, seconds of a step, and groups
sampled on the rank."""
ALPHABET = "0123456789+-="


def batch_of(groups: int, answers: int, prompt: int, tokens: int) -> RolloutBatch:
    rng = random.Random(0)

    def answer() -> Trajectory:
        sampled = [rng.randrange(13) for _ in range(tokens)]
        completion = Completion(sampled, [-rng.random() for _ in sampled], "stop", [7] * tokens)
        return Trajectory.single([1] * prompt, completion, "5" * tokens, float(rng.random() < 0.5))

    made = [
        TrajectoryGroup(n, Problem(f"{n}+" * (prompt // 2), {}), [answer() for _ in range(answers)], {})
        for n in range(groups)
    ]
    return RolloutBatch(made, [*range(groups)], 0, groups)


def main() -> None:
    for name, case in CASES.items():
        groups, answers, tokens = case["groups"], case["answers"], case["tokens"]
        batch = batch_of(groups, answers, case["prompt"], tokens)
        advantages, logprobs = torch.zeros(groups * answers), -torch.rand(groups * answers * tokens)
        with tempfile.TemporaryDirectory() as folder:
            run = RunDir(Path(folder))
            config = LoggingConfig(samples=case["sampled"])
            tokenizer = CharacterTokenizer(ALPHABET)
            record = RolloutRecord(run.attempt(1), 0, config, tokenizer, prompts_per_step=groups)
            began = time.process_time()
            for step in range(10, 10 + STEPS):
                record.add(step, batch, True, advantages, logprobs if record.is_sampled(step) else None)
            record.flush()
            a_step = (time.process_time() - began) / STEPS
            size = sum(file.stat().st_size for file in run.attempt(1).rollouts.iterdir()) / STEPS
            began = time.process_time()
            read = sum(1 for _ in read_rollouts(run, 1, 100))
            reading = time.process_time() - began
        share = a_step / case["step_s"]
        print(f"{name}: {1000 * a_step:.2f} ms and {size / 1000:.1f} kB a step, {share:.2%} of it; ", end="")
        print(f"{read} groups read in {reading:.2f} s")


if __name__ == "__main__":
    main()
