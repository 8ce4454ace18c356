"""Recorded decode steps draw the same tokens as steps that run operation by operation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from core_helpers import END, full_forward, stir, tiny_model, tiny_policy
from examples import examples
from gathered_attention import gathered_attention
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer import transformer_block
from operation_recorder import OperationRecorder

from megatron_rl.generate.engine.decode_graphs import MOST_RECORDED, DecodeGraphs, padded_rows, why_not_recorded
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.model.platform.cpu import CpuDevice, CpuKernels
from megatron_rl.model.platform.layer_kernels import TorchKernels
from megatron_rl.model.platform.paged_attention import PagedAttention, PagedRows
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling
from megatron_rl.recipe.model import ModelConfig

MODEL = tiny_model()
EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24}
LONG = {"max_new_tokens": 21, "min_new_tokens": 21}
"""Answers that end with a token that the host sees immediately."""


class RecordingKernels(CpuKernels):
    """Record decode steps on a CPU, and attend like a GPU's kernel: alike for all lengths."""

    tokens_between_syncs = 3
    computes_on_host = False
    layer_kernels = TorchKernels("a test")

    def __init__(self) -> None:
        self.recorder = OperationRecorder()

    def paged_attention(self, rows: PagedRows, dtype: torch.dtype) -> PagedAttention:
        return gathered_attention(replace(rows, bounds=np.full_like(rows.bounds, MODEL.max_position_embeddings)))

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        return None

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> OperationRecorder:
        return self.recorder


def recording_device() -> CpuDevice:
    device = CpuDevice(threads=1)
    device.kernels = RecordingKernels()
    return device


@pytest.fixture(scope="module")
def shared_policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(recording_device(), scale=0.15)


@pytest.fixture
def policy(shared_policy: Policy) -> Iterator[Policy]:
    """A policy with the same weights in every test."""
    weights = [weight.detach().clone() for weight in shared_policy.parameters()]
    yield shared_policy
    reset(shared_policy, weights)


@torch.no_grad()
def reset(policy: Policy, weights: list[torch.Tensor]) -> None:
    for weight, before in zip(policy.parameters(), weights, strict=True):
        weight.copy_(before)


def recorder_of(policy: Policy) -> OperationRecorder:
    assert isinstance(policy.kernels, RecordingKernels)
    return policy.kernels.recorder


def move(policy: Policy) -> None:
    """Move the weights to other addresses."""
    for weight in policy.parameters():
        weight.data = weight.data.clone()


def engine_of(
    policy: Policy, *, recorded: bool = True, keeps_cache: bool = True, model: ModelConfig = MODEL, **config: Any
) -> Engine:
    inference = InferenceConfig(**({"max_batch": 11, "page_tokens": 4} | config), cuda_graphs=recorded)
    engine = Engine(policy, model, inference, {END})
    engine.keeps_cache = keeps_cache
    return engine


def ask(prompt: list[int], samples: int = 1, key: int = 0, top: int = 0, **sampling: Any) -> GenerationRequest:
    asked = Sampling(**({"max_new_tokens": 20} | sampling))
    return GenerationRequest(prompt, samples, asked, key, top_logprobs=top)


REQUESTS = st.builds(
    ask,
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=12),
    samples=st.integers(1, 6),
    key=st.integers(0, 1000),
    top=st.sampled_from([0, 0, 2]),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3, 4]),
    min_new_tokens=st.sampled_from([0, 5]),
    max_new_tokens=st.integers(5, 24),
)
EVENTS = st.one_of(
    REQUESTS,
    st.integers(1, 12),  # steps
    st.sampled_from(["cancel", "new weights", "moved weights", "phase"]),
)


@examples(6)
@given(first=REQUESTS, events=st.lists(EVENTS, max_size=10), spare_tokens=st.integers(0, 120))
def test_answers_equal_those_of_unrecorded_steps(
    shared_policy: Policy, first: GenerationRequest, events: list[Any], spare_tokens: int
) -> None:
    """Requests of all kinds arrive, end, move, are cancelled and evicted; weights are replaced in place and elsewhere;
    the cache is freed between two phases. Padded sizes differ from the number of rows, so a padding row that wrote
    anywhere but to the spare page would change an answer."""
    weights = [weight.detach().clone() for weight in shared_policy.parameters()]
    engines = [
        engine_of(shared_policy, recorded=recorded, keeps_cache=False, cache_tokens=36 + spare_tokens)
        for recorded in (True, False)
    ]
    asked: list[list[GenerationRequest]] = [[], []]

    def each(event: Any) -> None:
        for engine, requests in zip(engines, asked, strict=True):
            if isinstance(event, GenerationRequest):
                requests.append(replace(event, id=f"{len(requests)}"))
                engine.submit(requests[-1])
            elif event == "cancel" and requests:
                engine.cancel(requests.pop().id)
            elif event == "phase":
                run(engine, 10**6)
                engine.end_phase()
            elif isinstance(event, int):
                run(engine, event)

    for number, event in enumerate([first, *events, 10**6]):
        if event == "moved weights":
            move(shared_policy)
        if event in ("new weights", "moved weights"):
            stir(shared_policy, 0.05, seed=number)
            for engine in engines:
                engine.policy_version = number
        each(event)
    for ours, theirs in zip(*asked, strict=True):
        for one, other in zip(engines[0].take(ours.id) or [], engines[1].take(theirs.id) or [], strict=True):
            assert (one.tokens, one.versions, one.finish_reason) == (other.tokens, other.versions, other.finish_reason)
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-5, atol=1e-5)
            assert [[*place] for place in one.top_logprobs or []] == [[*place] for place in other.top_logprobs or []]
    reset(shared_policy, weights)


def run(engine: Engine, steps: int) -> None:
    while engine.busy and steps:
        engine.step()
        steps -= 1


def test_step_is_recorded_once_for_each_size(policy: Policy) -> None:
    """The first step of a kind runs directly, the second is recorded, and all others are replayed."""
    recorder = recorder_of(policy)
    recorded, replayed = recorder.recorded, recorder.replayed
    engine = engine_of(policy)
    for samples in (3, 4, 7, 5):  # these are two padded sizes
        engine.submit(ask([1, 2, 3], samples, key=samples, **LONG))
        run(engine, 10**6)
    assert recorder.recorded - recorded == 2
    assert recorder.replayed - replayed == 4 * (LONG["max_new_tokens"] - 1) - 2


def test_unused_rows_stay_at_the_first_slot_of_the_spare_page(policy: Policy) -> None:
    engine = engine_of(policy)
    engine.submit(ask([1, 2], 3, **LONG))
    run(engine, 10**6)
    rows, spare = engine.runner._rows, engine.load.pages
    assert engine.runner.cache is not None and engine.runner.cache.keys[:, spare, :, 0].any()  # the fourth row wrote it
    assert not engine.runner.cache.keys[:, spare, :, 1:].any()
    assert rows.position[3:].tolist() == [0] * 8
    assert (rows.pages[3:] == spare).all()


def test_recordings_end_with_the_cache(policy: Policy) -> None:
    """Training needs their memory. If the cache stays, they stay too."""
    recorder = recorder_of(policy)
    for keeps_cache in (True, False):
        engine = engine_of(policy, keeps_cache=keeps_cache)
        recorded, released = recorder.recorded, recorder.released
        for _ in range(3):
            engine.submit(ask([1, 2], 3, **LONG))
            run(engine, 10**6)
            engine.end_phase()
        assert recorder.recorded - recorded == (1 if keeps_cache else 3)
        assert recorder.released - released == (0 if keeps_cache else 3)


def test_recordings_survive_weights_that_change_in_place(policy: Policy) -> None:
    recorder = recorder_of(policy)
    engine = engine_of(policy)

    def recordings() -> int:
        before = recorder.recorded
        engine.submit(ask([1, 2], 3, **LONG))
        run(engine, 10**6)
        engine.policy_version += 1
        return recorder.recorded - before

    assert [recordings(), recordings()] == [1, 0]
    move(policy)
    engine.policy_version += 1
    assert [recordings(), recordings()] == [1, 0]


def test_steps_with_experts_are_recorded_whatever_the_router_chooses(platform: Any, groups: Any) -> None:
    """Other tokens go to other experts in every step, and the recording of one step serves for all. It records their
    choices too."""
    model = tiny_model(**EXPERTS, router_replay="rollout")
    policy = tiny_policy(recording_device(), model, scale=0.15).requires_grad_(False).eval()
    found = []
    for recorded in (True, False):
        engine = engine_of(policy, recorded=recorded, model=model)
        engine.submit(one := ask([1, 2, 3], 5, **LONG))
        run(engine, 10**6)
        found.append(engine.take(one.id) or [])
    assert recorder_of(policy).recorded == 1
    assert [each.tokens for each in found[0]] == [each.tokens for each in found[1]]
    assert len({tuple(each.tokens) for each in found[0]}) == 5
    assert [each.choices for each in found[0]] == [each.choices for each in found[1]]
    assert all(len({*each.choices[3:]}) > 2 for each in found[0])


def test_number_of_recordings_is_limited(policy: Policy) -> None:
    recorder = OperationRecorder()
    graphs = DecodeGraphs(recorder, policy, 8)
    for key in range(3 * MOST_RECORDED):
        for _ in range(2):
            graphs.run(key, lambda: None)
    assert recorder.recorded == 3 * MOST_RECORDED
    assert recorder.released == 2


def test_step_that_cannot_be_recorded_runs_directly(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    recorder = OperationRecorder()
    monkeypatch.setattr(recorder, "record", fails)
    graphs, done = DecodeGraphs(recorder, policy, 8), []
    for key in ("a step", "a step of more rows"):
        for _ in range(3):
            graphs.run(key, lambda: done.append("a token"))
    graphs.drop()
    graphs.run("a step", lambda: done.append("a token"))
    graphs.run("a step", lambda: done.append("a token"))
    assert len(done) == 8
    assert ["inference.cuda_graphs=false" in each for each in caplog.messages] == [True], "the warning must appear once"


def test_padded_sizes_are_few_and_at_most_a_quarter_too_large() -> None:
    sizes = [padded_rows(rows) for rows in range(1, 257)]
    assert sorted({*sizes}) == [1, 2, 4, 8, *range(16, 65, 8), *range(80, 129, 16), *range(160, 257, 32)]
    for rows, size in enumerate(sizes, 1):
        assert rows <= size < max(rows + 8, 1.25 * rows)


@pytest.mark.parametrize(
    ("model", "inference", "why"),
    [
        ({}, {}, None),
        ({}, {"cuda_graphs": False}, "inference.cuda_graphs is false"),
        ({}, {"engine": "megatron"}, "inference.engine is megatron"),
        (EXPERTS, {}, None),
        (EXPERTS | {"expert_ffn_hidden_size": 20}, {}, "tokens each expert gets .* 32 x 20 on a rank"),
    ],
)
def test_unrecorded_steps_have_a_reason(model: Any, inference: Any, why: str | None) -> None:
    config = InferenceConfig(**inference)
    found = why_not_recorded(recording_device().kernels, tiny_model(**model), config, 256, tp=1)
    assert found is None if why is None else re.search(why, found or "")


@pytest.mark.parametrize("fused", [False, True])
def test_generation_beside_training_in_fp8_is_in_bf16_and_recorded(
    platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """A step in FP8 would round each weight again. Training after it is in FP8."""
    in_fp8 = mock.Mock(return_value=nullcontext())
    monkeypatch.setattr(transformer_block, "get_fp8_context", in_fp8)
    platform = recording_device()
    platform.kernels.layer_kernels = TorchKernels("a test") if fused else None
    policy = tiny_policy(platform)
    policy.config.fp8, policy.config.fp8_recipe = "hybrid", "tensorwise"
    engine = engine_of(policy)
    engine.submit(ask([1, 2, 3], 2, min_new_tokens=9))
    run(engine, 10**6)
    assert recorder_of(policy).recorded > 0
    in_fp8.assert_not_called()
    assert policy.hidden_shape(5) == (16, 1, MODEL.hidden_size), "training pads the tokens of FP8 products"
    full_forward(policy, [1, 2, 3])
    in_fp8.assert_called()


def test_cpu_records_nothing(platform: Any) -> None:
    found = why_not_recorded(platform.kernels, MODEL, InferenceConfig(), 16, tp=1)
    assert found and found.startswith("this device has no kernel for pages of 16 tokens in fp32; a GPU has one with")
