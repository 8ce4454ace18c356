"""One rank of mrl in `grpo_step.py`: the real training loop, whose record takes turns with the other side.

python grpo_step_ours.py FOLDER      FOLDER has size.txt; rank 0 writes base.pt and prompts.json there
"""

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from grpo_step_sizes import SIZES
from grpo_step_turns import Turns
from grpo_step_weights import as_qwen2, lengthen

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.select import select
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.groups import connect
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.metrics.writer import MetricsWriter
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.rank.world import World, die_with_parent
from megatron_rl.run.setup import set_up
from megatron_rl.run.state import Run
from megatron_rl.train_rl import train

PROMPTS = 4096


class TakingTurns(MetricsWriter):
    """The run's usual record. `timeline` is the last call of a step in the loop."""

    def __init__(self, run_dir: RunDir, run: Run, turns: Turns) -> None:
        super().__init__(run_dir, run_dir.attempt(1), run.config.logging, last_step=0, evaluated=-1)
        self._turns = turns
        self._metrics: Mapping[str, Any] = {}
        self._groups: Sequence[TrajectoryGroup] = ()
        self._collect = run.driver.collect
        run.driver.collect = self._keep  # type: ignore[method-assign]

    def _keep(self, first_ordinal: int) -> RolloutBatch:
        batch = self._collect(first_ordinal)
        self._groups = batch.groups
        return batch

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        super().step(step, metrics)
        self._metrics = metrics

    def timeline(self, line: TimelineLine) -> None:
        super().timeline(line)
        self._turns.step_ended(
            answer_length=self._metrics["answer_length"],
            generate_s=self._metrics["time/generate_s"],
            train_s=self._metrics["time/train_s"],
            # Only rank 0's answers: its share of the batch represents all.
            groups=[
                (group.trajectories[0].prompt_length, [answer.answer_length for answer in group.trajectories])
                for group in self._groups
            ],
        )


def main() -> None:
    folder = Path(sys.argv[1])
    die_with_parent()
    world = World.from_environment()
    turns = Turns() if world.rank == 0 else None
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    size = SIZES[(folder / "size.txt").read_text(encoding="utf-8")]
    config = size.config()
    run_dir = RunDir(folder)
    attempt = run_dir.attempt(1)
    attempt.folder.mkdir(parents=True, exist_ok=True)
    platform = select(config.job, world.local_rank)
    groups = connect(world, config.job, config.placement.training, platform.backend, attempt.address("train"))
    safe_points = SafePoints(Activity(attempt, published=world.rank == 0), DrainListener(attempt), Timeline())
    safe_points.connect(groups)
    run = set_up(config, Here(run_dir, attempt, platform, groups, safe_points))
    if size.end_bias:
        lengthen(run.trainer.policy, run.environment.tokenizer.eos_id, size.end_bias)

    if turns is not None:
        export(run, folder)
        parameters = sum(parameter.numel() for parameter in run.trainer.policy.parameters())
        turns.ready(parameters=parameters, tokens=run.environment.tokenizer.vocab_size)
        run.writer = TakingTurns(run_dir, run, turns)
    train(run)


@torch.no_grad()
def export(run: Run, folder: Path) -> None:
    """Write the other side's inputs: the same prompts and, unless both sides read them from one directory, the same
    weights, with logits to check them."""
    model, tokenizer = run.config.model, run.environment.tokenizer
    tokens = torch.randint(tokenizer.vocab_size, (12,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(len(tokens))
    logits = run.trainer.policy(tokens, positions, run.trainer.policy.layout(whole_sequences([len(tokens)])))
    own = model.init != "huggingface"
    weights = as_qwen2(run.trainer.policy, model, tokenizer.vocab_size) if own else {}
    torch.save({"weights": weights, "tokens": tokens, "logits": logits}, folder / "base.pt")
    problems = (run.driver.prompts.problem(ordinal) for ordinal in range(PROMPTS))
    rows = [{"prompt": problem.prompt, "answer": problem.golden["answer"]} for problem in problems]
    (folder / "prompts.json").write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
