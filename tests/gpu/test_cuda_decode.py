"""Decoding attention with split keys, at the shape of a rank of Qwen2.5-32B with tensor parallelism 8."""

from __future__ import annotations

import pytest
import torch
from gpu_helpers import NEEDS_CUDA
from torch import Tensor

from megatron_rl.platform.flash_kernels import PagedKernel, find_paged_kernel
from megatron_rl.platform.kernel_speed import key_splits

pytestmark = NEEDS_CUDA

ROWS, TOKENS, PAGE = 8, 10_000, 256
HEADS, HEAD_SIZE = 5, 128  # of one key/value head
PAGES = -(-TOKENS // PAGE)
TIMED = 50


@pytest.fixture(scope="module")
def kernel() -> PagedKernel:
    found = find_paged_kernel()
    if found is None:
        pytest.skip("no kernel here reads pages: flash-attn 2.7.4 or later, or torch 2.13, has one")
    return found


@pytest.fixture(scope="module")
def cached() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values, table and lengths."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device="cuda").bfloat16()

    pages = ROWS * PAGES
    table = torch.randperm(pages, generator=generator, device="cuda").int().view(ROWS, PAGES)
    lengths = TOKENS - 37 * torch.arange(ROWS, dtype=torch.int32, device="cuda")
    keys, values = (random(pages, PAGE, 1, HEAD_SIZE) for _ in range(2))
    return random(ROWS, HEADS, HEAD_SIZE), keys, values, table, lengths


def by_definition(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Attention in float64."""
    rows = []
    for row, length in enumerate(lengths.tolist()):
        key, value = (pages[table[row].long()].flatten(0, 2)[:length].double() for pages in (keys, values))
        rows.append((query[row].double() @ key.T / HEAD_SIZE**0.5).softmax(-1) @ value)
    return torch.stack(rows)


@pytest.mark.parametrize("splits", [1, 8, 16, key_splits(TOKENS)])
def test_split_keys_attend_as_the_formula_says_whatever_the_other_rows(
    kernel: PagedKernel, cached: tuple[Tensor, ...], splits: int, record_property: pytest.RecordProperty
) -> None:
    query, keys, values, table, lengths = cached

    def attend(rows: slice) -> Tensor:
        return kernel.attend(query[rows], keys, values, table[rows], lengths[rows], PAGES * PAGE, splits)

    attended, expected = attend(slice(None)), by_definition(*cached)
    assert (attended.double() - expected).abs().max() < 2e-2 * expected.abs().max()
    for row in range(ROWS):
        assert torch.equal(attend(slice(row, row + 1))[0], attended[row])
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(TIMED):
        attend(slice(None))
    ended.record()
    torch.cuda.synchronize()
    record_property(f"{kernel.name}, {splits} splits, us", round(1000 * began.elapsed_time(ended) / TIMED, 1))
