"""Training of the prediction layer: it learns, and the policy learns as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from core_helpers import batch_of, build_run, random_groups, tiny_model, tiny_run
from family_shapes import GLM
from optional import needs
from supervised_helpers import sums, supervised_run, write_rows

from megatron_rl.rank.metrics.stats import StepStats, Tally
from megatron_rl.run.state import Run


def step(run: Run, batch: Any, number: int) -> StepStats:
    stats, tally = run.trainer.train(batch, number), Tally()
    stats.put(tally)
    return stats.reduced(tally.reduce(run.groups.control).total)


def trained(platform: Any, groups: Any, coefficient: float) -> tuple[list[StepStats], dict[str, torch.Tensor]]:
    model = tiny_model(**GLM, prediction_layers=1, prediction_loss_coefficient=coefficient)
    config = tiny_run(
        model=model.model_dump(), optimizer={"clip_grad": 0.01, "learning_rate": 1e-2}, grpo={"kl_beta": 0.1}
    )
    run = build_run(config, platform, groups)
    steps = [step(run, batch_of(random_groups(4, 4, seed=number), 0, 4), number) for number in range(1, 4)]
    return steps, {name: weight.detach().clone() for name, weight in run.trainer.policy.named_parameters()}


def test_the_policy_learns_the_same_bits_whatever_the_prediction_layer_learns(platform: Any, groups: Any) -> None:
    """Also where gradients are clipped: each by its own norm."""
    (alone, weights), (beside, found) = trained(platform, groups, 0.0), trained(platform, groups, 100.0)
    assert [s.update.grad_norm for s in beside] == [s.update.grad_norm for s in alone]
    assert all(s.update.grad_norm > 0.01 for s in alone)
    assert [s.loss.loss for s in beside if s.loss] == [s.loss.loss for s in alone if s.loss]
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    ahead = found.keys() - weights.keys()
    assert ahead and all(name.startswith("mtp.") for name in ahead)
    _, other = trained(platform, groups, 1.0)
    # The gradient of a bias of keys is zero except for rounding, which Adam magnifies.
    clipped = [name for name in ahead if not name.endswith("linear_qkv.bias")]
    unclipped = [name for name in clipped if not torch.allclose(other[name], found[name], rtol=1e-3, atol=1e-5)]
    assert not unclipped, "clipped gradients of the layer do not depend on the factor of its loss"
    assert alone[0].loss and alone[0].loss.prediction is None


@needs("datasets")
def test_the_prediction_loss_falls_in_ten_supervised_steps(tmp_path: Path, platform: Any, groups: Any) -> None:
    file = write_rows(tmp_path / "rows.jsonl", sums(6))
    model = tiny_model(**GLM, prediction_layers=1, prediction_loss_coefficient=0.2)
    config = supervised_run(
        data={"path": str(file), "examples_per_step": 6},
        model=model.model_dump(),
        training={"steps": 10},
        optimizer={"learning_rate": 1e-2},
    )
    run = build_run(config, platform, groups)
    losses = []
    for number in range(10):
        loss = step(run, run.driver.collect(number * 6), number).loss
        assert loss and loss.predicted == loss.tokens  # each question has several tokens
        losses.append(loss.prediction / loss.predicted)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prediction_layers": 0}, "needs prediction_layers 1, not 0: the weights have none"),
        ({"prediction_layers": 2}, "needs prediction_layers 1, not 2: training is built for one"),
        ({"prediction_layers": 1, "lora": {"rank": 4}}, "lora adapters alone: set 0"),
        ({"prediction_layers": 1, "prediction_loss_coefficient": -0.1}, "greater than or equal to 0"),
    ],
)
def test_recipes_that_cannot_train_it_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        tiny_model(**GLM | {"prediction_loss_coefficient": 0.1} | fields)
