"""A supervised step beside `transformers` in float64 and TRL's SFTTrainer, on the same rows and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import ALPHABET, build_run
from optional import needs
from published_twin import published, published_twin
from supervised_helpers import sums, supervised_run, write_rows
from torch import Tensor

from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.rank.metrics.stats import StepStats, Tally
from megatron_rl.run.state import Run

pytestmark = needs("datasets")

ROWS = sums(9)
ROWS[3] = ROWS[1]  # two equal rows in one batch share all their tokens in a packed one


def run_on(tmp_path: Path, platform: Any, groups: Any, rows: int = len(ROWS), **sections: Any) -> Run:
    """A run whose data is ROWS. Its model has no row of the vocabulary beyond the tokens, as `transformers` knows none.

    rows: rows of each step.
    """
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    data, tokenizer = {"path": str(file), "examples_per_step": rows}, {"alphabet": ALPHABET + "*"}
    return build_run(supervised_run(data=data, tokenizer=tokenizer, **sections), platform, groups)


def step(run: Run, batch: RolloutBatch) -> StepStats:
    stats = run.trainer.train(batch, 1)
    tally = Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total)


def padded(batch: RolloutBatch) -> tuple[Tensor, Tensor]:
    """[rows, longest] tokens, and those whose prediction is learned."""
    answers = [group.trajectories[0] for group in batch.groups]
    longest = max(len(each.tokens) for each in answers)
    tokens = [each.tokens + [0] * (longest - len(each.tokens)) for each in answers]
    masks = [each.loss_mask + [False] * (longest - len(each.tokens)) for each in answers]
    return torch.tensor(tokens), torch.tensor(masks)


def cross_entropy(twin: Any, batch: RolloutBatch) -> Tensor:
    """Mean of -log p of the learned tokens over all rows."""
    tokens, mask = padded(batch)
    logprobs = torch.log_softmax(twin(tokens).logits[:, :-1], -1).gather(2, tokens[:, 1:, None]).squeeze(2)
    return -(logprobs * mask[:, 1:]).sum() / mask.sum()


@pytest.mark.parametrize("room", [10_000, 40, 1], ids=["one micro-batch", "several", "one a row"])
def test_loss_and_gradients_are_those_of_transformers_in_float64(
    room: int, tmp_path: Path, platform: Any, groups: Any
) -> None:
    run = run_on(tmp_path, platform, groups, training={"tokens_per_microbatch": room})
    batch = run.driver.collect(0)
    assert len(batch.groups) == len(ROWS)
    twin = published_twin(run.trainer.policy, run.config.model).double()
    expected = cross_entropy(twin, batch)
    expected.backward()
    run.trainer.optimizer.megatron.prepare_grads = lambda: True  # pretend that it is not finite: nothing is updated
    seen = step(run, batch)
    assert seen.loss is not None
    assert seen.loss.loss == pytest.approx(expected.item(), rel=1e-6)
    assert seen.loss.tokens == int(padded(batch)[1].sum())
    ours = published(run.trainer.policy, run.config.model, lambda weight: weight.main_grad)
    for name, weight in twin.named_parameters():
        torch.testing.assert_close(ours[name].double(), weight.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_temperature_of_sampling_does_not_change_the_loss(tmp_path: Path, platform: Any, groups: Any) -> None:
    sampled = {"environment": {"name": "arithmetic", "args": {}}, "sampling": {"max_new_tokens": 3, "temperature": 0.5}}
    losses = []
    for sections in ({}, sampled):
        run = run_on(tmp_path, platform, groups, **sections)
        losses.append(step(run, run.driver.collect(0)).loss.loss)  # type: ignore[union-attr]
    assert losses[0] == losses[1]


def test_the_loss_is_that_of_trl_on_the_same_batches(tmp_path: Path, platform: Any, groups: Any) -> None:
    """SFTTrainer trains the converted weights on the same tokens and masks, three batches with updates between them."""
    pytest.importorskip("trl", reason="trl is an optional part of the benchmarks: pip install -e '.[bench]'")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from trl import SFTConfig, SFTTrainer

    steps, each = 3, 3
    run = run_on(
        tmp_path,
        platform,
        groups,
        each,
        optimizer={"learning_rate": 1e-3, "warmup_steps": 0, "beta2": 0.999, "clip_grad": 0.0},
    )
    twin = published_twin(run.trainer.policy, run.config.model)
    batches = [run.driver.collect(number * each) for number in range(steps)]
    ours = [step(run, batch).loss.loss for batch in batches]  # type: ignore[union-attr]

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *args: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    answers = [group.trajectories[0] for batch in batches for group in batch.groups]
    rows = [{"input_ids": one.tokens, "completion_mask": [int(m) for m in one.loss_mask]} for one in answers]
    settings = SFTConfig(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=each,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        completion_only_loss=True,
        gradient_checkpointing=False,
    )
    theirs = InOrder(twin, settings, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(tmp_path))
    theirs.train()
    logged = [line["loss"] for line in theirs.state.log_history if "loss" in line]
    assert ours == pytest.approx(logged, abs=1e-5)


def tokenizer(folder: Path) -> Any:
    """A tokenizer for TRL, which only pads with it."""
    from hf_helpers import tokenizer as small

    found = small()
    found.pad_token, found.eos_token = found.convert_ids_to_tokens([0, 1])
    return found
