"""Penalties and biases change what is drawn as defined, and change neither log-probs nor other rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core_helpers import END, tiny_model, tiny_policy
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_rl.generate.engine.adjustments import AdjustedRows
from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.generate.engine.api import Completion, GenerationRequest
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.model.policy import Policy
from megatron_rl.recipe.inference import AdjustedSampling, InferenceConfig, Sampling

VOCAB = 12
CPU = torch.device("cpu")
LENGTH = 8


def prefill(sampling: Sampling, prompt: list[int]) -> Prefill:
    return Prefill(prompt, 0, [], [0], [0], [], [], 0, sampling, penalized=prompt)


def adjusted_logits(logits: torch.Tensor, asked: list[tuple[Sampling, list[int], list[int]]]) -> torch.Tensor:
    """asked: sampling, prompt and answer of each row."""
    rows = AdjustedRows(len(asked), LENGTH, VOCAB, CPU)
    tokens = torch.full((len(asked), LENGTH), 3)  # tokens behind the answer must be ignored
    for row, (sampling, prompt, answer) in enumerate(asked):
        rows.set(slice(row, row + 1), prefill(sampling, prompt))
        tokens[row, : len(answer)] = torch.tensor(answer, dtype=torch.long)
    count = torch.tensor([len(answer) for _, _, answer in asked])
    return rows.adjusted(slice(None), logits, tokens, count)


def by_definition(logits: np.ndarray, sampling: AdjustedSampling, prompt: list[int], answer: list[int]) -> np.ndarray:
    """vLLM's definition in float64, token by token."""
    made = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias:
        made[token] += bias
    for token in range(len(made)):
        if token in prompt or token in answer:
            made[token] *= sampling.repetition_penalty if made[token] < 0 else 1 / sampling.repetition_penalty
        made[token] -= sampling.frequency_penalty * answer.count(token)
        made[token] -= sampling.presence_penalty * (token in answer)
    return made


TOKENS = st.integers(0, VOCAB - 1)
PENALTIES = st.sampled_from([-2.0, -0.3, 0.0, 0.5, 2.0])
ADJUSTED = st.builds(
    AdjustedSampling,
    max_new_tokens=st.just(LENGTH),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.1, 3.0]),
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 4.0]), max_size=3).map(lambda d: (*d.items(),)),
)


@examples(30)
@given(
    asked=st.lists(
        st.tuples(ADJUSTED, st.lists(TOKENS, min_size=1, max_size=LENGTH), st.lists(TOKENS, max_size=LENGTH)),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 1000),
)
def test_logits_are_adjusted_as_defined(asked: list[tuple[AdjustedSampling, list[int], list[int]]], seed: int) -> None:
    logits = 3 * torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed))
    found = adjusted_logits(logits, [*asked])
    for row, (sampling, prompt, answer) in enumerate(asked):
        expected = by_definition(logits[row].numpy(), sampling, prompt, answer)
        np.testing.assert_allclose(found[row].numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("penalty", [0.6, 1.3])
def test_repetition_penalty_equals_that_of_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    prompt, answer = [1, 5, 5], [2, 0]
    asked = AdjustedSampling(max_new_tokens=4, repetition_penalty=penalty)
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([prompt + answer]), logits.clone())
    torch.testing.assert_close(adjusted_logits(logits, [(asked, prompt, answer)]), expected)


def test_rows_without_adjustments_keep_every_bit() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[1, 4], logits[1, 5] = -torch.inf, 0.0
    plain = Sampling(max_new_tokens=4)
    penalized = AdjustedSampling(max_new_tokens=4, repetition_penalty=2, presence_penalty=1, logit_bias=((0, 7),))
    found = adjusted_logits(logits, [(penalized, [1], [2]), (plain, [1], [4, 5]), (plain, [3], [])])
    assert torch.equal(found[1:], logits[1:]) and not torch.equal(found[0], logits[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": 2.1}, {"frequency_penalty": -3}, {"repetition_penalty": 0},
        {"logit_bias": ((1, 101),)}, {"logit_bias": ((1, 1), (1, 2))}, {"logit_bias": ((-1, 1),)},
        {"logit_bias": tuple((token, 1) for token in range(1025))},
    ],
    ids=str,
)  # fmt: skip
def test_adjustments_have_limits(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        AdjustedSampling(max_new_tokens=4, **wrong)


# In the engine

MODEL = tiny_model(hidden_size=64, ffn_hidden_size=96, max_position_embeddings=64)
PROMPT = [1, 2, 3, 2, 1]


@pytest.fixture(scope="module")
def policy(platform: Any, groups: Any) -> Policy:
    return tiny_policy(platform, MODEL, scale=0.1)


def answer_all(policy: Policy, *requests: GenerationRequest, **config: Any) -> list[list[Completion]]:
    engine = Engine(policy, MODEL, InferenceConfig(**config), {END})
    for request in requests:
        engine.submit(request)
    while engine.busy:
        engine.step()
    return [engine.take(request.id) or [] for request in requests]


def request(sampling: Sampling, samples: int = 2, key: int = 5) -> GenerationRequest:
    return GenerationRequest(PROMPT, samples, sampling, key)


def logits_after(policy: Policy, tokens: list[int]) -> np.ndarray:
    """The policy's logits of the next token."""
    from megatron_rl.model.platform.attention import whole_sequences

    with torch.inference_mode():
        layout = policy.layout(whole_sequences([len(tokens)]))
        made = policy(torch.tensor(tokens), torch.arange(len(tokens)), layout)
    return made[-1].double().numpy()


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 4.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 0.5},
        {"logit_bias": ((4, 3.0), (6, -100.0))},
    ],
    ids=str,
)  # fmt: skip
def test_greedy_answer_takes_the_likeliest_adjusted_token(policy: Policy, asked: dict[str, Any]) -> None:
    """Checked token by token; log-probs are those of the unadjusted policy."""
    sampling = AdjustedSampling(max_new_tokens=20, temperature=0, ignore_eos=True, **asked)
    ((found,),) = answer_all(policy, request(sampling, samples=1))
    plain = AdjustedSampling(max_new_tokens=20, temperature=0, ignore_eos=True)
    assert found.tokens != answer_all(policy, request(plain, samples=1))[0][0].tokens
    for place, token in enumerate(found.tokens):
        logits = logits_after(policy, PROMPT + found.tokens[:place])
        wanted = by_definition(logits, sampling, PROMPT, found.tokens[:place])
        assert wanted.max() - wanted[token] < 1e-5
        logprobs = torch.tensor(logits).log_softmax(-1)
        assert found.logprobs[place] == pytest.approx(logprobs[token].item(), abs=1e-5)


def test_ignore_eos_lets_answers_contain_end_tokens(policy: Policy) -> None:
    """Also with min_new_tokens, which then excludes no token."""
    wants_end = {"logit_bias": ((END, 5.0),), "max_new_tokens": 12}
    (ending,), (ignoring,), (held,), (stopping,) = answer_all(
        policy,
        request(AdjustedSampling(**wants_end), samples=1),
        request(AdjustedSampling(**wants_end, ignore_eos=True), samples=1),
        request(AdjustedSampling(**wants_end, ignore_eos=True, min_new_tokens=12), samples=1),
        request(AdjustedSampling(**wants_end, ignore_eos=True, stop_tokens=(END,)), samples=1),
    )
    assert ending.finish_reason == "stop" and len(ending.tokens) < 12
    assert (ignoring.finish_reason, len(ignoring.tokens)) == ("length", 12) and END in ignoring.tokens[:-1]
    assert held == ignoring and stopping == ending


@examples(6)
@given(
    asked=st.lists(st.tuples(ADJUSTED, st.integers(1, 3), st.integers(0, 100)), min_size=1, max_size=3),
    max_batch=st.integers(3, 10),
)
def test_answers_depend_only_on_their_own_request(
    policy: Policy, asked: list[tuple[AdjustedSampling, int, int]], max_batch: int
) -> None:
    """Neighbours may adjust their logits or not; rows move, wait and reuse rows of others."""
    requests = [request(*each) for each in asked] + [request(Sampling(max_new_tokens=6), 3, 9)]
    together = answer_all(policy, *requests, max_batch=max_batch, share_prefixes=False)
    for each, found in zip(requests, together, strict=True):
        assert found == answer_all(policy, each.again(), share_prefixes=False)[0]


def test_reused_row_drops_the_adjustments_of_its_previous_sample(policy: Policy) -> None:
    penalized = request(AdjustedSampling(max_new_tokens=3, repetition_penalty=9, logit_bias=((5, 50),)), 1)
    plain = request(Sampling(max_new_tokens=6), 1)
    assert answer_all(policy, penalized, plain, max_batch=1)[1] == answer_all(policy, plain.again())[0]


def test_bias_of_a_token_outside_the_vocabulary_is_refused(policy: Policy) -> None:
    asked = request(AdjustedSampling(max_new_tokens=2, logit_bias=((policy.vocabulary, 1),)))
    with pytest.raises(ValueError, match=r"sampling.logit_bias: .* is not a token"):
        answer_all(policy, asked)
