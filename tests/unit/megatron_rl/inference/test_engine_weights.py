"""New weights for an engine of this process: applied between two tokens, completely or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from core_helpers import END, VOCAB, full_forward, stir, tiny_model, tiny_policy
from torch import Tensor
from transformers_witness import in_their_names

from megatron_rl.inference.api import Completion, GenerationRequest, Unsupported
from megatron_rl.inference.broadcast import TensorPlan
from megatron_rl.inference.config import InferenceConfig, Sampling
from megatron_rl.inference.engine import Engine
from megatron_rl.inference.weights import WrongWeights
from megatron_rl.model.policy import Policy

PROMPT = [1, 10, 2, 12]
MODEL = tiny_model()


@pytest.fixture
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, scale=0.15).requires_grad_(False)


@pytest.fixture
def other(platform: Any, groups: Any) -> Policy:
    found = tiny_policy(platform, scale=0.15)
    stir(found, 0.2, seed=5)
    return found


def tensors_of(policy: Policy) -> dict[str, Tensor]:
    found = in_their_names(policy, MODEL, lambda weight: weight.detach())
    return {name: tensor[:VOCAB] if "embed" in name or "lm_head" in name else tensor for name, tensor in found.items()}


def engine_of(policy: Policy) -> Engine:
    return Engine(policy, MODEL, InferenceConfig(max_batch=4), {END})


def request(tokens: int = 12) -> GenerationRequest:
    # min_new_tokens: answers must not end early with any weights
    return GenerationRequest(PROMPT, 1, Sampling(temperature=0.0, max_new_tokens=tokens, min_new_tokens=tokens), key=0)


def greedy(policy: Policy, tokens: list[int]) -> int:
    logits = full_forward(policy, [*PROMPT, *tokens])[-1, :VOCAB].clone()
    logits[END] = -torch.inf
    return int(logits.argmax())


def test_engine_samples_with_the_new_weights(policy: Policy, other: Policy) -> None:
    engine = engine_of(policy)

    async def work() -> list[Completion]:
        await engine.update_weights(7, tensors_of(other).items())
        return await engine.generate(request())

    (made,) = asyncio.run(work())
    assert made.versions == [7] * 12
    assert engine.policy_version == 7
    for place, token in enumerate(made.tokens):
        assert token == greedy(other, made.tokens[:place])


def test_new_weights_apply_between_two_tokens_of_an_answer(policy: Policy, other: Policy) -> None:
    engine = engine_of(policy)
    before = {name: tensor.clone() for name, tensor in tensors_of(policy).items()}

    async def work() -> Completion:
        tokens, logprobs, versions = [], [], []
        async for delta in engine.stream(request()):
            tokens += delta.tokens
            logprobs += delta.logprobs
            versions += delta.versions
            if len(tokens) == 5:
                await engine.update_weights(7, tensors_of(other).items())
        return Completion(tokens, logprobs, "length", versions)

    made = asyncio.run(work())
    assert made.versions == [0] * 5 + [7] * 7
    original = tiny_policy(policy.platform)
    twin = engine_of(original.requires_grad_(False))
    asyncio.run(twin.update_weights(0, before.items()))
    assert [greedy(original, made.tokens[:place]) for place in range(5)] == made.tokens[:5]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: found.pop("model.norm.weight"), r"1 of the model's tensors are missing: model.norm.weight"),
        (lambda found: found.update({"model.extra": torch.zeros(2)}), "no tensor model.extra"),
        (lambda found: found.update({"model.norm.weight": torch.zeros(2)}), r"model.norm.weight has shape \[2\], and"),
    ],
)
def test_incomplete_weights_leave_no_answers(policy: Policy, other: Policy, spoil: Any, message: str) -> None:
    engine, found = engine_of(policy), tensors_of(other)
    spoil(found)

    async def work() -> None:
        asked = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        with pytest.raises(WrongWeights, match=message):
            await engine.update_weights(7, found.items())
        with pytest.raises(WrongWeights, match=message):  # the caller that waits gets it too
            await asked
        with pytest.raises(RuntimeError, match="update_weights"):
            await engine.generate(request())
        await engine.update_weights(8, tensors_of(other).items())
        (made,) = await engine.generate(request())
        assert made.versions == [8] * 12

    asyncio.run(asyncio.wait_for(work(), timeout=60))


def test_tensor_that_comes_twice_is_refused(policy: Policy, other: Policy) -> None:
    twice = [*tensors_of(other).items()] * 2
    with pytest.raises(WrongWeights, match="came twice"):
        asyncio.run(engine_of(policy).update_weights(1, twice))


class Told:
    """Channel from the first rank: tensors, then the release of its followers."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._tensors = [(TensorPlan(name, tuple(tensor.shape), tensor.dtype), tensor) for name, tensor in tensors]

    def receive(self) -> TensorPlan | None:
        return self._tensors[0][0] if self._tensors else None

    def receive_tensor(self, plan: TensorPlan) -> Tensor:
        return self._tensors.pop(0)[1]


@pytest.mark.parametrize("first", [3, None], ids=["half a set", "a set"])
def test_follower_accepts_the_next_set_without_a_computation_in_between(
    policy: Policy, other: Policy, first: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank does so after an error in the middle of the previous set."""
    before, after = ([*tensors_of(each).items()] for each in (tiny_policy(policy.platform, scale=0.3), other))
    engine = engine_of(policy)
    monkeypatch.setattr(engine, "_plans", Told(before[:first] + after))
    engine.follow(nullcontext)
    for name, tensor in tensors_of(policy).items():
        assert torch.equal(tensor, tensors_of(other)[name])


def test_weights_of_the_trainer_are_not_replaced(other: Policy) -> None:
    before = {name: weight.clone() for name, weight in other.state_dict().items() if isinstance(weight, Tensor)}
    with pytest.raises(Unsupported, match="trainer's own"):
        asyncio.run(engine_of(other).update_weights(1, tensors_of(other).items()))
    for name, weight in before.items():
        assert torch.equal(other.state_dict()[name], weight)
