"""Log-probs of prompts equal their definition in transformers: in pieces, beside others, and on cached pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from core_helpers import END, tiny_model, tiny_policy
from streams import answer_all

from megatron_rl.generate.engine import admission
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import Completion, Delta, GenerationRequest
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import InferenceConfig, Sampling

MODEL = tiny_model(hidden_size=64, ffn_hidden_size=96, max_position_embeddings=64)
PROMPT = [number * 7 % 13 for number in range(1, 42)]


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, MODEL, scale=0.3)


def asked(prompt: list[int], most: int | None = 2, samples: int = 1, length: int = 3) -> GenerationRequest:
    return GenerationRequest(prompt, samples, Sampling(max_new_tokens=length), 5, prompt_logprobs=most)


def engine(policy: Policy, **config: Any) -> Engine:
    return Engine(policy, MODEL, InferenceConfig(page_tokens=8, **config), {END})


def check(policy: Policy, prompt: list[int], found: Completion, most: int) -> None:
    """Compare with one pass over the whole prompt."""
    assert found.prompt is not None
    with torch.inference_mode():
        tokens = torch.tensor(prompt)
        logits = policy(tokens, torch.arange(len(prompt)), policy.layout(whole_sequences([len(prompt)])))
    logprobs = logits[:-1].double().log_softmax(-1)
    own = logprobs.gather(1, tokens[1:, None])
    torch.testing.assert_close(torch.tensor(found.prompt.logprobs).double(), own.squeeze(1), rtol=1e-5, atol=1e-4)
    assert found.prompt.ranks == ((logprobs > own).sum(1) + 1).tolist()
    values, _ = logprobs.topk(max(most, 1))
    assert len(found.prompt.top_logprobs) == len(prompt) - 1
    for place, (top, best) in enumerate(zip(found.prompt.top_logprobs, values, strict=True)):
        assert [*top.values()] == pytest.approx(best[:most].tolist(), abs=1e-4)
        assert [*top.values()] == pytest.approx(logprobs[place, [*top]].tolist(), abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 17, 41])
@pytest.mark.parametrize("at_once", [8, 512])
def test_prompt_is_scored_token_by_token(
    policy: Policy, length: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "SCORED_AT_ONCE", at_once)
    ((found,),) = answer_all(engine(policy), asked(PROMPT[:length]))
    check(policy, PROMPT[:length], found, 2)
    ((plain,),) = answer_all(engine(policy), asked(PROMPT[:length], None))
    assert plain.prompt is None and plain.tokens == found.tokens


def test_scores_without_likeliest_tokens_and_the_same_for_every_sample(policy: Policy) -> None:
    (found,) = answer_all(engine(policy), asked(PROMPT, 0, samples=3))
    for each in found:
        check(policy, PROMPT, each, 0)


def test_cached_prefixes_and_neighbours_leave_no_gap(policy: Policy) -> None:
    """Cached pages have no logits, so all of the prompt is computed again."""
    shared = engine(policy, max_batch=3)
    first = answer_all(shared, asked(PROMPT, None))[0][0]
    requests = [asked(PROMPT, None, 2), asked(PROMPT, 2, 2), asked(PROMPT[:20], 1), asked(PROMPT[:9], None)]
    answered = answer_all(shared, *requests)
    assert answered[0][0].tokens == first.tokens
    for each in answered[1]:
        check(policy, PROMPT, each, 2)
    check(policy, PROMPT[:20], answered[2][0], 1)
    assert answered[3][0].prompt is None


def test_prompt_is_scored_again_if_the_weights_change_midway(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "SCORED_AT_ONCE", 8)
    changed = engine(policy)
    request = asked(PROMPT)
    changed.submit(request)
    changed.step()
    changed.step()
    changed.policy_version = 3
    while changed.busy:
        changed.step()
    (found,) = changed.take(request.id) or []
    check(policy, PROMPT, found, 2)
    assert changed.scheduler.prefilled_tokens == 16 + len(PROMPT)


def test_stream_returns_the_scores_with_the_first_delta_of_a_sample(policy: Policy) -> None:
    streaming = engine(policy)
    streaming.submit(asked(PROMPT, 2, samples=2), streamed=True)
    deltas: list[Delta] = []
    while streaming.busy:
        streaming.step()
        deltas += [delta for _, delta in streaming.take_deltas()]
    for sample in (0, 1):
        mine = [delta for delta in deltas if delta.sample == sample]
        assert len(mine) > 1 and [delta.prompt is not None for delta in mine] == [True] + [False] * (len(mine) - 1)
