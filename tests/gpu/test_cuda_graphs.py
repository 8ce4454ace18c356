"""Decode steps recorded as CUDA graphs give the tokens of unrecorded steps, and the model's log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import END, VOCAB, tiny_model, tiny_policy
from gpu_helpers import DEVICE, NEEDS_GPU

from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, GenerationRequest
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

pytestmark = NEEDS_GPU

MODEL = tiny_model(
    hidden_size=256, ffn_hidden_size=512, dtype="bf16", max_position_embeddings=1024, tied_embeddings=False
)
BF16 = 5e-2
"""Tolerance of a log-prob."""


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    policy = tiny_policy(platform, MODEL, scale=0.05).requires_grad_(False).eval()
    assert policy.vocabulary == VOCAB
    return policy


def engine_of(policy: Policy, *, recorded: bool) -> Engine:
    engine = Engine(policy, MODEL, InferenceConfig(max_batch=24, cuda_graphs=recorded), {END})
    engine.keeps_cache = False
    assert (engine.runner._graphs is not None) == (recorded and DEVICE == "cuda")
    return engine


def answers(engine: Engine, requests: list[GenerationRequest], every: int = 0) -> list[list[Completion]]:
    """every: number of steps between two requests."""
    for request in requests:
        engine.submit(request)
        for _ in range(every):
            engine.step()
    while engine.busy:
        engine.step()
    found = [engine.take(request.id) or [] for request in requests]
    engine.end_phase()
    return found


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {}, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01}],
    ids=["greedy", "sampled", "cut"],
)
def test_recorded_steps_sample_the_same_tokens(policy: Policy, sampling: dict[str, Any]) -> None:
    """Eight rows from beginning to end, computed by the same kernels either way. Each of three phases records again;
    before the last one new weights replace the old ones in place."""
    kind = Sampling(**{"max_new_tokens": 70, "min_new_tokens": 70} | sampling)
    engines = [engine_of(policy, recorded=recorded) for recorded in (True, False)]
    for phase in range(3):
        if phase == 2:
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(1.01)
        found = []
        for engine in engines:
            engine.policy_version = phase
            found.append(answers(engine, [GenerationRequest([1, 2, 3] * 70, 8, kind, key=phase, top_logprobs=2)]))
        ((ours,), (theirs,)) = found
        assert [one.tokens for one in ours] == [one.tokens for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-4, atol=1e-4)


def test_log_probs_are_the_models_while_rows_come_and_go(policy: Policy) -> None:
    """Rows without a request write to no page in use: all tokens of each answer are attended to again."""
    requests = [
        GenerationRequest([key % VOCAB] * (1 + 37 * key), 1 + key % 3, Sampling(max_new_tokens=20 + 8 * key), key)
        for key in range(12)
    ]
    device = policy.device
    for request, completions in zip(requests, answers(engine_of(policy, recorded=True), requests, 7), strict=True):
        for one in completions:
            whole = [*request.prompt_tokens, *one.tokens]
            with torch.no_grad():
                logits = policy(
                    torch.tensor(whole, device=device),
                    torch.arange(len(whole), device=device),
                    policy.layout(whole_sequences([len(whole)])),
                )
            logprobs = torch.log_softmax(logits[len(request.prompt_tokens) - 1 : -1].float(), dim=-1)
            expected = logprobs.gather(1, torch.tensor(one.tokens, device=device)[:, None]).squeeze(1)
            torch.testing.assert_close(torch.tensor(one.logprobs), expected.cpu(), rtol=BF16, atol=BF16)


def test_moved_weights_are_used(policy: Policy) -> None:
    """The memory of the old weights is overwritten."""
    engine = engine_of(policy, recorded=True)
    kind = Sampling(max_new_tokens=40, min_new_tokens=40, temperature=0.0)
    requests = [GenerationRequest([1, 2, 3], 8, kind, key=0) for _ in range(2)]
    first = requests[0]
    engine.submit(first)
    for _ in range(10):
        engine.step()
    for weight in policy.parameters():
        moved = weight.data.clone()
        weight.data.fill_(float("nan"))
        weight.data = moved
    engine.policy_version = 1
    while engine.busy:
        engine.step()
    ours = engine.take(first.id) or []
    ((theirs,),) = [answers(engine_of(policy, recorded=False), [requests[1]])]
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]


def test_an_engine_that_ends_its_phase_leaves_the_recordings_of_another(policy: Policy) -> None:
    kind = Sampling(max_new_tokens=60, min_new_tokens=60, temperature=0.0)
    engines = [engine_of(policy, recorded=True) for _ in range(2)]
    requests = [GenerationRequest([1, 2, 3], 8, kind, key=0) for _ in range(3)]
    for engine, request in zip(engines, requests, strict=False):
        engine.submit(request)
        for _ in range(10):
            engine.step()
    engines[0].cancel(requests[0].id)
    engines[0].end_phase()
    while engines[1].busy:
        engines[1].step()
    ours = engines[1].take(requests[1].id) or []
    ((theirs,),) = [answers(engine_of(policy, recorded=False), [requests[2]])]
    assert [one.tokens for one in ours] == [one.tokens for one in theirs]
