"""Answers are those of the model for any size of pages, cache and prefill, and with any cached prefix."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from core_helpers import END, answer_logprobs, tiny_model, tiny_policy, tiny_run
from examples import examples
from flash_attn_stand_in import FLASH_ATTN
from hypothesis import given
from hypothesis import strategies as st
from streams import answer_all

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest, PromptTooLong
from megatron_rl.model.platform.attention import Layout, PackedSequences
from megatron_rl.model.platform.cpu import CPU, CpuDevice, CpuKernels
from megatron_rl.model.platform.cuda_attention import CudaAttention
from megatron_rl.model.platform.cuda_kernels import CudaKernels
from megatron_rl.model.platform.flash_kernels import find_paged_kernels, find_varlen_kernel
from megatron_rl.model.platform.layer_kernels import TorchKernels
from megatron_rl.model.platform.paged_attention import PagedAttention, PagedChunks, PagedRows
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import PAGE_TOKENS, InferenceConfig, Sampling, pages_of

SYSTEM = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PROMPTS = [
    [*SYSTEM, 7],
    [7],
    [*SYSTEM, 9, 7, 9, 3],
    [5, 11, 5],
    SYSTEM,
    [*SYSTEM, 7, 2],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
]
PLAIN = Sampling(temperature=0.9, max_new_tokens=12)
MOST_SAMPLES = 4


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15)


def engine_of(policy: Policy, **config: Any) -> Engine:
    return Engine(policy, tiny_model(), InferenceConfig(**({"max_batch": 16, "page_tokens": 4} | config)), {END})


def assert_the_models(policy: Policy, requests: Sequence[GenerationRequest], found: list[list[Completion]]) -> None:
    """Each token is the one that its random number draws from the model's distribution, and has its log-prob."""
    for request, ours in zip(requests, found, strict=True):
        theirs = of_the_model(policy, tuple(request.prompt_tokens), request.sampling, request.key)[: len(ours)]
        assert len(ours) == request.num_samples
        assert [each.tokens for each in ours] == [each.tokens for each, _ in theirs]
        assert [each.finish_reason for each in ours] == [each.finish_reason for each, _ in theirs]
        for each, (_, expected) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(each.logprobs), expected, rtol=1e-5, atol=1e-5)


@cache
def of_the_model(
    policy: Policy, prompt: tuple[int, ...], sampling: Sampling, key: int
) -> list[tuple[Completion, torch.Tensor]]:
    """The first samples of an engine with only this request and room for all of it; log-probs are of a full forward."""
    engine = engine_of(policy, page_tokens=64, share_prefixes=False)
    (found,) = answer_all(engine, GenerationRequest([*prompt], MOST_SAMPLES, sampling, key))
    return [(each, answer_logprobs(policy, prompt, each.tokens, sampling.temperature)) for each in found]


@examples(6)
@given(
    page_tokens=st.integers(1, 20),
    spare_tokens=st.integers(0, 60),
    prefill_tokens=st.integers(1, 30),
    max_batch=st.integers(1, 12),
    samples=st.lists(st.integers(1, MOST_SAMPLES), min_size=len(PROMPTS), max_size=len(PROMPTS)),
    shares=st.booleans(),
)
def test_pages_pressure_pieces_and_shared_prefixes_change_no_answer(
    policy: Policy,
    page_tokens: int,
    spare_tokens: int,
    prefill_tokens: int,
    max_batch: int,
    samples: list[int],
    shares: bool,
) -> None:
    longest = -(-(max(map(len, PROMPTS)) + PLAIN.max_new_tokens) // page_tokens) * page_tokens
    engine = engine_of(
        policy,
        page_tokens=page_tokens,
        cache_tokens=longest + spare_tokens,
        prefill_tokens=prefill_tokens,
        max_batch=max_batch,
        share_prefixes=shares,
    )
    requests = [GenerationRequest(prompt, samples[i], PLAIN, i) for i, prompt in enumerate(PROMPTS)]
    assert_the_models(policy, requests, answer_all(engine, *requests))
    assert engine.load.free_pages == engine.load.pages


class ReadsPages(CpuKernels):
    """Generate on a CPU like on a GPU, with Triton's kernels for pages and flash-attn's for packed sequences."""

    computes_on_host = False
    layer_kernels = TorchKernels("a test")

    def __init__(self) -> None:
        self.attention = CudaAttention(find_varlen_kernel(), pages=find_paged_kernels())

    def attention_layout(
        self, packed: PackedSequences, dtype: torch.dtype, part: torch.Tensor | None = None, *, sinks: bool = False
    ) -> Layout:
        assert part is None and not sinks, "a part of the tokens would compile FlexAttention"
        return self.attention.layout(packed, CPU, torch.bfloat16)

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        return self.attention.paged(rows, dtype)

    def chunk_attention(self, chunks: PagedChunks, dtype: torch.dtype) -> PagedAttention | None:
        return self.attention.chunks(chunks, CPU, dtype)

    def gathers_pages(self, dtype: torch.dtype, page_tokens: int) -> bool:
        return False


def test_on_a_gpu_found_and_cut_prefixes_are_read_in_place(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    for name, module in (FLASH_ATTN | {"transformer_engine": None}).items():
        monkeypatch.setitem(sys.modules, name, module)
    device = CpuDevice(threads=1)
    device.kernels = ReadsPages()
    of_gpu = tiny_policy(device, scale=0.15)
    of_gpu.load_state_dict(policy.state_dict())
    engine = engine_of(of_gpu, prefill_tokens=8)
    short = PLAIN.model_copy(update={"max_new_tokens": 3})  # kernels are interpreted
    requests = [GenerationRequest(prompt, 2, short, i) for i, prompt in enumerate(PROMPTS)]
    assert_the_models(policy, requests, answer_all(engine, *requests))
    assert engine.scheduler.prefilled_tokens < sum(map(len, PROMPTS)), "no prefix was found"


def test_request_larger_than_the_cache_is_refused(policy: Policy) -> None:
    engine = engine_of(policy, cache_tokens=24)
    answer_all(engine, GenerationRequest([1] * 12, 1, PLAIN, 0))
    with pytest.raises(
        PromptTooLong, match=r"13 tokens and .*max_new_tokens 12 .* 24 tokens \(inference.cache_tokens\)"
    ):
        engine.submit(GenerationRequest([1] * 13, 1, PLAIN, 0))
    assert not engine.busy


def test_next_phase_reuses_nothing_of_the_previous_one(policy: Policy) -> None:
    """Otherwise its results would depend on evaluations in between, and a resumed run would differ."""
    engine = engine_of(policy)
    request = GenerationRequest(SYSTEM, 1, PLAIN, 0)
    answer_all(engine, request)
    engine.end_phase()
    before = engine.scheduler.prefilled_tokens
    answer_all(engine, GenerationRequest(SYSTEM, 1, PLAIN, 0))
    assert engine.scheduler.prefilled_tokens - before == len(SYSTEM)


def test_cache_has_the_configured_size() -> None:
    assert pages_of(InferenceConfig(max_batch=3), 16, 40) == (9, 16)
    assert pages_of(InferenceConfig(max_batch=3), 256, 40) == (3, 40)
    assert pages_of(InferenceConfig(max_batch=3, cache_tokens=100), 16, 40) == (6, 16)
    assert {"cpu": CpuKernels.page_tokens, "cuda": CudaKernels.page_tokens} == PAGE_TOKENS


@pytest.mark.parametrize(("cache_tokens", "fits"), [(48, True), (63, True), (47, False), (7, False)])
def test_recipe_whose_cache_cannot_hold_one_full_sequence_is_refused(cache_tokens: int, fits: bool) -> None:
    if fits:
        assert tiny_run(inference={"cache_tokens": cache_tokens}).page_tokens == 16
    else:
        with pytest.raises(ValueError, match=f"inference.cache_tokens {cache_tokens} holds .*longest .* has 48"):
            tiny_run(inference={"cache_tokens": cache_tokens})
