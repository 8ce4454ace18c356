"""One forward, one backward: the order in which a pipeline stage starts and finishes its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from core_helpers import tiny_model
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.learn.training.schedule import ModelInput, forward_backward

MICROBATCHES = 5


class Stage:
    """Stand-in for a pipeline and a policy that records starts (F) and ends (B)."""

    def __init__(self, stages: int, stage: int) -> None:
        self.first, self.last, self.behind = stage == 0, stage == stages - 1, stages - 1 - stage
        self.events = ""
        self.weight = torch.ones(1, requires_grad=True)
        self.config, self.model_config = self, tiny_model()
        self.params_dtype, self.device = torch.float32, torch.device("cpu")

    def begin_microbatch(self, number: int) -> None: ...
    def layout(self, batch: MicroBatch) -> None: ...
    def hidden_shape(self, tokens: int) -> tuple[int]:
        return (tokens,)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Any, received: Tensor | None, replay: None) -> Tensor:
        self.events += "F"
        return self.weight * (1.0 if received is None else received)

    def predictors(self, hidden: Tensor, select: Tensor) -> Tensor:
        return hidden

    def receive_forward(self, empty: Callable[[], Tensor]) -> Tensor | None:
        return None if self.first else empty().zero_()

    def receive_backward(self, output: Tensor) -> Tensor | None:
        self.events += "B"
        return None if self.last else torch.ones_like(output)

    def send_forward(self, hidden: Tensor) -> None: ...
    def send_backward(self, gradient: Tensor) -> None: ...
    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("stage", "order"), [(0, "FFFBFBFBBB"), (1, "FFBFBFBFBB"), (2, "FBFBFBFBFB")], ids=["first", "middle", "last"]
)
def test_a_stage_starts_one_micro_batch_ahead_for_each_stage_behind_it(stage: int, order: str) -> None:
    """No stage is idle for longer than the pipeline takes to fill, or holds the activations of more micro-batches."""
    its: Any = Stage(3, stage)
    inputs = [ModelInput.of(its, MicroBatch.empty())] * MICROBATCHES
    forward_backward(its, inputs, lambda hidden, _: hidden.sum(), its, stop=lambda: False)
    assert its.events == order


def test_micro_batches_started_before_a_stop_are_finished() -> None:
    its: Any = Stage(3, 0)
    inputs = [ModelInput.of(its, MicroBatch.empty())] * MICROBATCHES
    forward_backward(its, inputs, lambda hidden, _: hidden.sum(), its, stop=lambda: its.events.count("F") == 2)
    assert its.events == "FFBB"
