"""CPU answers are the same bit for bit, log-probs included, whatever else is decoded at the same time. This holds as
long as an answer is computed in the same pieces: after an eviction, with a cached prefix, with a prompt longer than one
prefill, or if it starts later than others of its group, another kernel attends to the same tokens and log-probs differ
by rounding. Experts get different numbers of tokens each time, and four ranks sum in an order that depends on the
amount of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import END, tiny_model, tiny_policy
from examples import examples
from family_shapes import QWEN35
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.model.platform import frozen_linear
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytestmark = pytest.mark.bits

SHAPE = {"hidden_size": 64, "ffn_hidden_size": 96, "max_position_embeddings": 64}
MODELS = {
    "fp32": tiny_model(**SHAPE),
    "bf16": tiny_model(**SHAPE, dtype="bf16"),
    "delta nets": tiny_model(**QWEN35 | SHAPE),
}
SAMPLES = 5
"""Most tokens of a prompt. All samples of the first request have a row, so that they start together."""
REQUESTS = st.builds(
    lambda prompt, samples, limit, temperature, top_k, key: GenerationRequest(
        prompt, samples, Sampling(max_new_tokens=limit, temperature=temperature, top_k=top_k), key
    ),
    prompt=st.lists(st.integers(0, 12), min_size=1, max_size=20),
    samples=st.integers(1, SAMPLES),
    limit=st.integers(1, 12),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    key=st.integers(0, 1000),
)


@pytest.fixture(scope="module")
def policies(platform: Any, groups: Any) -> dict[str, Policy]:
    return {name: tiny_policy(platform, model, scale=0.1) for name, model in MODELS.items()}


def answers(policy: Policy, requests: list[GenerationRequest], arriving: list[int], **config: Any) -> list[Completion]:
    """Answers to the first request. arriving: number of steps before each further request."""
    engine = Engine(policy, policy.model_config, InferenceConfig(share_prefixes=False, **config), {END})
    gaps = iter(arriving)
    for request in requests:
        engine.submit(request)
        for _ in range(next(gaps, 0)):
            engine.step()
    while engine.busy:
        engine.step()
    return engine.take(requests[0].id) or []


# four rows instead of eight: few enough for other kernels
@example(
    request=GenerationRequest([0], 1, Sampling(max_new_tokens=4, temperature=0.0), 0),
    others=[GenerationRequest([0, 0, 0, 0], 1, Sampling(max_new_tokens=4, temperature=0.0), 0)],
    arriving=[],
    max_batch=SAMPLES,
    threads=1,
    model="fp32",
    least_packed=2**30,
)
@examples(6)
@given(
    request=REQUESTS,
    others=st.lists(REQUESTS, max_size=4),
    arriving=st.lists(st.integers(0, 4), max_size=6),
    max_batch=st.integers(SAMPLES, 12),
    threads=st.sampled_from([1, 2]),
    model=st.sampled_from([*MODELS]),
    least_packed=st.sampled_from([1, 2**30]),
)
def test_answer_is_the_same_whatever_its_neighbours(
    policies: dict[str, Policy],
    request: GenerationRequest,
    others: list[GenerationRequest],
    arriving: list[int],
    max_batch: int,
    threads: int,
    model: str,
    least_packed: int,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(frozen_linear, "LEAST_PACKED", least_packed)
            alone = answers(policies[model], [request], [])
            together = answers(policies[model], [request, *others], arriving, max_batch=max_batch, page_tokens=8)
    finally:
        torch.set_num_threads(before)
    assert together == alone
