"""Prefill, decoding and sampling on a phantom GPU: every tensor is on the right device, and the host waits for the
device at most once in eight tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import ALPHABET, END, VOCAB, tiny_model
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.generate.engine import row_state
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.engine.model_runner import ModelRunner
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.scheduler import Scheduler, StepPlan
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import build_policy
from megatron_rl.model.tokenizer import CharacterTokenizer
from megatron_rl.recipe.inference import InferenceConfig, Sampling

GPU = torch.device("cuda", 0)
TOKENS_PER_WAIT = 8
"""The limit that model/platform/cuda_kernels.py promises."""

LONGEST = 400
PAGE = 256
TOKENIZER = CharacterTokenizer(ALPHABET)
SAMPLINGS = [
    Sampling(max_new_tokens=32),
    Sampling(max_new_tokens=32, temperature=0.0),
    Sampling(max_new_tokens=32, top_k=4, top_p=0.9, min_p=0.05, min_new_tokens=16),
    Sampling(max_new_tokens=32, stop_tokens=(1, 2), stop=("77",)),
]


class Reads:
    """Replaces `row_state._read`. Every other row, including the first, has ended at each check."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tensor: Any) -> Any:
        assert isinstance(tensor, FakeTensor) and tensor.device == GPU
        self.count += 1
        if tensor.dtype is torch.bool:
            return np.arange(len(tensor)) % 2 == 0
        read = np.full(tuple(tensor.shape), END, dtype=np.int32)
        read[:, 0] = np.arange(len(read)) % 2 == 0  # tokens of each row, then an end token
        return read


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # which is 0 for all of them
def test_host_waits_at_most_once_in_eight_tokens(platform: Any, groups: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of all kinds of sampling end, move together and are refilled, and some are followed. Reading a number
    anywhere except in `_read` raises an error here."""
    reads = Reads()
    monkeypatch.setattr(row_state, "_read", reads)
    model = tiny_model(dtype="bf16", head_dim=16, num_layers=1, max_position_embeddings=LONGEST)
    with PhantomDevice(GPU) as gpu:
        policy = build_policy(model, VOCAB, PhantomCuda(gpu))
        config = InferenceConfig(max_batch=3)
        pages = Pages(3 * -(-LONGEST // PAGE), PAGE)
        scheduler = Scheduler(config, pages, {END}, TOKENIZER.decode)
        runner = ModelRunner(policy, model, config, (pages.count, PAGE), {END}, LONGEST)
        assert runner._graphs is not None
        for key, sampling in enumerate(SAMPLINGS):
            request = GenerationRequest([1, 2, 3 + key], 1, sampling, key, top_logprobs=key)
            scheduler.submit(request, streamed=key == 1)
        decoded, moved, synchronous = 0, 0, 0
        while plan := scheduler.decode() or scheduler.admit():
            before = gpu.waits
            execute(scheduler, runner, plan)
            if plan.prefills:
                assert gpu.waits == before
                continue
            decoded, moved = decoded + 1, moved + len(plan.moves)
            synchronous += gpu.waits - before
            if admission := scheduler.admit():
                execute(scheduler, runner, admission)
    assert len(scheduler.answered) == len(SAMPLINGS) - 1
    assert scheduler.deltas[-1][1].finish_reason
    assert decoded > 3 * TOKENS_PER_WAIT and moved
    assert 3 <= reads.count + synchronous <= decoded / TOKENS_PER_WAIT + 2  # a check may be due here


WINDOWED = {"layer_types": ["sliding_attention"], "sliding_window": 128, "attention_sinks": True, "output_bias": True}
OF_LATENT = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT = {"latent_attention": OF_LATENT, "num_query_groups": 4, "qkv_bias": False}


@pytest.mark.parametrize(
    ("of_page", "shape"),
    [(64, {}), (256, {}), (256, WINDOWED), (256, LATENT)],
    ids=["small pages", "large pages", "sinks in a window", "values smaller than keys"],
)
def test_pieces_and_cached_prefixes_are_computed_on_the_device(
    platform: Any, groups: Any, of_page: int, shape: dict[str, Any]
) -> None:
    fields = {"head_dim": 16, "num_layers": 1, "max_position_embeddings": 7 * of_page} | shape
    model = tiny_model(dtype="bf16", **fields)
    with PhantomDevice(GPU) as gpu:
        policy = build_policy(model, VOCAB, PhantomCuda(gpu))
        config = InferenceConfig(max_batch=4, prefill_tokens=2 * of_page)
        scheduler = Scheduler(config, Pages(20, of_page), {END})
        runner = ModelRunner(policy, model, config, (20, of_page), {END}, 7 * of_page)
        for key in range(2):  # the second request finds the prefix of the first
            prompt = [1] * (5 * of_page) + [key] * 9
            scheduler.submit(GenerationRequest(prompt, 2, SAMPLINGS[0].model_copy(update={"max_new_tokens": 50}), key))
        plans, waits = [], []
        while plan := scheduler.admit():
            plans.append([(each.start, len(each.tokens)) for each in plan.prefills])
            before = gpu.waits
            assert runner.execute(plan) is None
            waits.append(gpu.waits - before)
    assert plans == [[(0, 2 * of_page)], [(2 * of_page, 2 * of_page)], [(4 * of_page, of_page + 9), (5 * of_page, 9)]]
    assert waits == [0, 0, 0]


def execute(scheduler: Scheduler, runner: ModelRunner, plan: StepPlan) -> None:
    """Drive the runner as the engine does."""
    ended = runner.execute(plan)
    if ended is not None:
        scheduler.retire(runner.answers(scheduler.wanted(ended)))
