"""A row of a product is the same bit for bit for any number and order of other rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from megatron_rl.model.platform import frozen_linear
from megatron_rl.model.platform.frozen_linear import FrozenLinear, freeze, freezes

pytestmark = pytest.mark.bits

ROWS = 192


@pytest.fixture(params=[1, 2, 3], ids=["1 thread", "2 threads", "3 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("least_packed", [1, 2**30], ids=["large", "small"])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 128), (96, 16), (300, 200)])
def test_a_row_of_a_product_depends_on_itself_alone(
    threads: int,
    least_packed: int,
    dtype: torch.dtype,
    inputs: int,
    outputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not freezes(dtype):
        pytest.skip("this processor does not multiply bf16")
    monkeypatch.setattr(frozen_linear, "LEAST_PACKED", least_packed)
    generator = torch.Generator().manual_seed(inputs)
    rows, weight, bias, other = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((ROWS, inputs), (outputs, inputs), (outputs,), (ROWS, outputs))
    )
    with torch.inference_mode():
        linear = freeze(weight, bias)
        together = results(linear, rows, other)
        for count in {linear.rows_multiple, 64, 128}:
            for some, all_ in zip(results(linear, rows[:count], other[:count]), together, strict=True):
                assert torch.equal(some, all_[:count])
        everywhere = results(linear, rows[:1].repeat(ROWS, 1), other[:1].repeat(ROWS, 1))
        for result, all_ in zip(everywhere, together, strict=True):
            assert torch.equal(result, all_[:1].expand_as(result))


def results(linear: FrozenLinear, rows: Tensor, other: Tensor) -> list[Tensor]:
    return [linear(rows), linear.silu(rows), linear.added(rows, other), linear.multiplied(rows, other)]


def test_each_operation_applies_to_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight, bias, other = (
        torch.randn(size, generator=generator) for size in ((64, 24), (40, 24), (40,), (64, 40))
    )
    for least_packed in (1, 2**30):
        monkeypatch.setattr(frozen_linear, "LEAST_PACKED", least_packed)
        for of_outputs in (None, bias):
            product = torch.nn.functional.linear(
                rows.double(), weight.double(), None if of_outputs is None else of_outputs.double()
            )
            expected = [product, torch.nn.functional.silu(product), other + product, other * product]
            with torch.inference_mode():
                found = results(freeze(weight, of_outputs), rows, other)
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)
