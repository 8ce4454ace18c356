"""Attention to pages at the shape of a rank of Qwen2.5-32B with tensor parallelism 8: decoding with split keys, and
prefills that continue sequences. On a CPU, a smaller cache and Triton's interpreter."""

from __future__ import annotations

import os
from functools import partial
from typing import NamedTuple

import pytest
import torch
from gpu_helpers import DEVICE, NEEDS_GPU, replayed
from torch import Tensor

from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.flash_kernels import PagedKernel, find_paged_kernels
from megatron_rl.recipe.kernel_speed import key_splits

pytestmark = NEEDS_GPU

ROWS, TOKENS, PAGE = (8, 10_000, 256) if DEVICE == "cuda" else (3, 500, 64)
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter's products of bf16 are wrong
HEADS, HEAD_SIZE = 5, 128  # of one key/value head
PAGES = -(-TOKENS // PAGE)
NEW = [1, 700, 1, 2000, 64, 65, 3, 1000] if DEVICE == "cuda" else [1, 40, 21]
"""New tokens of each sequence in a prefill."""


class Cached(NamedTuple):
    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    lengths: Tensor


@pytest.fixture(scope="module", params=["flash-attn", "Triton"])
def kernel(request: pytest.FixtureRequest) -> PagedKernel:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    found = next((each for each in find_paged_kernels() if each.name.startswith(request.param)), None)
    if found is None:
        pytest.skip(f"{request.param} is not installed, or is too old")
    return found


@pytest.fixture(params=["plain", "window and sinks"])
def form(request: pytest.FixtureRequest) -> AttentionForm:
    plain = request.param == "plain"
    return PLAIN if plain else AttentionForm(128, None, torch.linspace(-2, 4, HEADS, device=DEVICE))


def random(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator(DEVICE).manual_seed(len(sizes)), device=DEVICE).to(DTYPE)


@pytest.fixture(scope="module")
def cached() -> Cached:
    pages = ROWS * PAGES
    table = torch.randperm(pages, generator=torch.Generator(DEVICE).manual_seed(0), device=DEVICE)
    lengths = TOKENS - 37 * torch.arange(ROWS, dtype=torch.int32, device=DEVICE)
    keys, values = random(2, pages, PAGE, 1, HEAD_SIZE)
    return Cached(random(ROWS, HEADS, HEAD_SIZE), keys, values, table.int().view(ROWS, PAGES), lengths)


def by_definition(cached: Cached, query: Tensor, row: int, length: int, form: AttentionForm) -> Tensor:
    """Attention of one token, [heads, head_size], in float64."""
    first = max(0, length - form.window) if form.window else 0
    key, value = (
        pages[cached.table[row].long()].flatten(0, 2)[first:length].double() for pages in (cached.keys, cached.values)
    )
    scores = query.double() @ key.T / HEAD_SIZE**0.5
    if form.sinks is not None:
        scores = torch.cat((scores, form.sinks[:, None]), dim=-1)
    return scores.softmax(-1)[:, : len(key)] @ value


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found.double() - expected).abs().max() < 2e-2 * expected.abs().max())


@pytest.mark.parametrize("splits", [1, 8, 16, key_splits(TOKENS)])
def test_split_keys_attend_as_the_formula_says_whatever_the_other_rows(
    kernel: PagedKernel, cached: Cached, splits: int, form: AttentionForm, record_property: pytest.RecordProperty
) -> None:
    query, keys, values, table, lengths = cached

    def attend(rows: slice) -> Tensor:
        return kernel.attend(query[rows], keys, values, table[rows], lengths[rows], PAGES * PAGE, splits, form)

    attended = attend(slice(None))
    assert close(
        attended, torch.stack([by_definition(cached, query[row], row, int(lengths[row]), form) for row in range(ROWS)])
    )
    for row in range(ROWS):
        assert torch.equal(attend(slice(row, row + 1))[0], attended[row])
    if DEVICE == "cuda":
        recorded, microseconds = replayed(partial(attend, slice(None)))
        assert torch.equal(recorded, attended)
        record_property(f"{kernel.name}, {splits} splits, us", round(microseconds, 1))


def test_new_tokens_attend_to_what_is_before_them(
    kernel: PagedKernel, cached: Cached, form: AttentionForm, record_property: pytest.RecordProperty
) -> None:
    _, keys, values, table, lengths = cached
    query = random(sum(NEW), HEADS, HEAD_SIZE)
    of_queries, of_keys = (
        torch.nn.functional.pad(each.cumsum(0), (1, 0)).int()
        for each in (torch.tensor(NEW, device=DEVICE), lengths.long())
    )
    given = (query, keys, values, table, of_queries, of_keys, (max(NEW), TOKENS), form)
    attended, first = kernel.attend_chunks(*given), 0
    for row, new in enumerate(NEW):
        for token in {0, new // 2, new - 1}:
            length = int(lengths[row]) - new + 1 + token
            expected = by_definition(cached, query[first + token], row, length, form)
            assert close(attended[first + token], expected), (row, token)
        first += new
    if DEVICE == "cuda":
        _, microseconds = replayed(lambda: kernel.attend_chunks(*given))
        record_property(f"{kernel.name}, {sum(NEW)} new tokens, us", round(microseconds, 1))
