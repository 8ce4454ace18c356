"""One forward, one backward: in which order a stage of a pipeline begins and finishes its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.training.schedule import ModelInput, forward_backward

MICROBATCHES = 5


class Stage:
    """Of a pipeline and of a policy at once: it notes what is begun (F) and finished (B)."""

    def __init__(self, stages: int, stage: int) -> None:
        self.first, self.last, self.behind = stage == 0, stage == stages - 1, stages - 1 - stage
        self.events = ""
        self.weight = torch.ones(1, requires_grad=True)
        self.config = self
        self.params_dtype, self.device = torch.float32, torch.device("cpu")

    def hidden_shape(self, tokens: int) -> tuple[int]:
        return (tokens,)

    def hidden(self, tokens: Tensor, positions: Tensor, layout: Any, received: Tensor | None) -> Tensor:
        self.events += "F"
        return self.weight * (1.0 if received is None else received)

    def predictors(self, hidden: Tensor, select: Tensor) -> Tensor:
        return hidden

    def receive_forward(self, empty: Callable[[], Tensor]) -> Tensor | None:
        return None if self.first else empty().zero_()

    def receive_backward(self, made: Tensor) -> Tensor | None:
        self.events += "B"
        return None if self.last else torch.ones_like(made)

    def send_forward(self, hidden: Tensor) -> None: ...
    def send_backward(self, gradient: Tensor) -> None: ...
    def flush(self) -> None: ...


@pytest.mark.parametrize(
    ("stage", "order"), [(0, "FFFBFBFBBB"), (1, "FFBFBFBFBB"), (2, "FBFBFBFBFB")], ids=["first", "middle", "last"]
)
def test_a_stage_begins_as_many_micro_batches_ahead_as_stages_are_behind_it(stage: int, order: str) -> None:
    """So that none stands idle for longer than the pipeline takes to fill, and none holds the activations of more."""
    its: Any = Stage(3, stage)
    inputs = [ModelInput(MicroBatch.empty(), layout=None)] * MICROBATCHES  # type: ignore[arg-type]
    forward_backward(its, inputs, lambda hidden, _: hidden.sum(), its, stop=lambda: False)
    assert its.events == order


def test_what_was_begun_before_a_stop_is_finished() -> None:
    its: Any = Stage(3, 0)
    inputs = [ModelInput(MicroBatch.empty(), layout=None)] * MICROBATCHES  # type: ignore[arg-type]
    forward_backward(its, inputs, lambda hidden, _: hidden.sum(), its, stop=lambda: its.events.count("F") == 2)
    assert its.events == "FFBB"
