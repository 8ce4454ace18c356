"""Sampling of a token: cuts keep the right tokens, frequencies equal probabilities, log-probs are uncut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_rl.generate.engine.sampling import BELOW_1, BLOCK, BLOCKS_FROM, SamplingRows, invert, keep_likely, sample
from megatron_rl.recipe.inference import Sampling

CPU = torch.device("cpu")
END = 7
ALL = slice(None)
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -4.0])


def rows_of(*samplings: Sampling) -> SamplingRows:
    rows = SamplingRows(len(samplings), CPU, {END})
    for row, sampling in enumerate(samplings):
        rows.set(slice(row, row + 1), sampling)
    return rows


def alike(sampling: Sampling, count: int) -> SamplingRows:
    rows = SamplingRows(count, CPU, {END})
    rows.set(ALL, sampling)
    return rows


def draw(logits: Tensor, rows: SamplingRows, uniform: Tensor, count: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probs. count: number of answer tokens before."""
    count = torch.zeros(len(logits), dtype=torch.long) if count is None else count
    tokens, logprobs, ends = sample(logits, rows[ALL], rows.work(ALL, count.numpy()), uniform, count)
    assert ends.tolist() == [token in row for token, row in zip(tokens.tolist(), rows[ALL].ends.tolist(), strict=True)]
    return tokens, logprobs


def keep(probs: Tensor, rows: SamplingRows) -> Tensor:
    return keep_likely(probs, rows[ALL], rows.work(ALL, np.zeros(len(probs), dtype=np.int64)))


def params(**fields: float) -> Sampling:
    return Sampling(max_new_tokens=1, **fields)


def cut_by_definition(probs: list[float], sampling: Sampling) -> set[int]:
    """Return the tokens that may be drawn: top-k, then the shortest head with top_p of the rest, then min-p."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        # The engine's precision decides where the sum up to a token equals the limit: 15 of 50 with top_p 0.3.
        limit = np.float32(sampling.top_p) * np.float32(sum(probs[token] for token in order))
        mass, head = 0.0, []
        for token in order:
            if mass >= limit:
                break
            head.append(token)
            mass += probs[token]
        order = head
    return {token for token in order if probs[token] >= sampling.min_p * max(probs)}


CUTS = [
    {"top_k": 3}, {"top_k": 1}, {"top_k": 100}, {"top_p": 0.7}, {"top_p": 1e-6}, {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8}, {"top_k": 6, "top_p": 0.95, "min_p": 0.1}, {},
]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuts_keep_the_tokens_of_their_definition(cut: dict[str, float]) -> None:
    probs = LOGITS.softmax(-1)
    kept = keep(probs[None], rows_of(params(**cut)))[0]
    assert set(kept.nonzero().squeeze(1).tolist()) == cut_by_definition(probs.tolist(), params(**cut))
    assert torch.equal(kept[kept > 0], probs[kept > 0])


@examples(20)
@given(
    likely=st.lists(st.integers(1, 4), min_size=40, max_size=40),
    cuts=st.lists(st.sampled_from([{"temperature": 0.0}, {"top_p": 0.3}, *CUTS]), min_size=1, max_size=4),
)
def test_first_of_equally_likely_tokens_stay_whatever_other_rows_need(
    likely: list[int], cuts: list[dict[str, float]]
) -> None:
    """Many are equally likely in bf16. Which of them a sort puts first depends on how many it sorts."""
    probs = torch.tensor(likely, dtype=torch.float) / 1024  # with exact sums
    together = keep(probs.expand(len(cuts), -1), rows_of(*(params(**cut) for cut in cuts)))
    for cut, kept in zip(cuts, together, strict=True):
        assert set(kept.nonzero().squeeze(1).tolist()) == cut_by_definition(probs.tolist(), params(**cut))


@examples(20)
@given(seed=st.integers(0, 1000), beyond=st.integers(0, BLOCK), uniform=st.floats(0, BELOW_1))
def test_large_vocabulary_is_drawn_like_one_running_sum(seed: int, beyond: int, uniform: float) -> None:
    """Except for rounding, and never a token that was cut."""
    vocab = BLOCKS_FROM + beyond
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(2, vocab, generator=generator).softmax(-1)
    weights[torch.rand(2, vocab, generator=generator) < 0.5] = 0
    weights[1, : vocab - 1 - seed % BLOCK] = 0  # only the last blocks have weight
    weights[1, -1] = 0.5
    places = invert(weights, torch.tensor([uniform, uniform], dtype=torch.float64))
    for row, place in zip(weights.double().numpy(), places.tolist(), strict=True):
        sums = row.cumsum() / row.sum()
        assert row[place] > 0
        assert sums[place] > uniform - 1e-6 and sums[place] - row[place] / row.sum() <= uniform + 1e-6


@pytest.mark.parametrize("vocab", [BLOCKS_FROM - 1, BLOCKS_FROM, BLOCKS_FROM + 1])
@pytest.mark.parametrize("nothing", [torch.nan, -torch.inf])
def test_broken_model_still_draws_valid_tokens(vocab: int, nothing: float) -> None:
    """Looking up a token outside the vocabulary would crash the GPU, and hide the error in the weights."""
    logits = torch.full((1, vocab), nothing)
    (token,), (logprob,) = draw(logits, rows_of(params()), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= token < vocab and logprob.isnan()


# Values of the chi-square distribution with 1 to 7 degrees of freedom that are exceeded with probability 1e-4
CHI_SQUARE_1E4 = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}


@pytest.mark.parametrize(
    "sampling",
    [params(), params(temperature=0.5), params(temperature=2.0, top_k=4), params(top_p=0.8), params(min_p=0.2)],
    ids=str,
)
def test_frequencies_equal_probabilities(sampling: Sampling) -> None:
    draws = 20_000
    probs = (LOGITS / sampling.temperature).softmax(-1)
    allowed = sorted(cut_by_definition(probs.tolist(), sampling))
    expected = draws * probs[allowed] / probs[allowed].sum()
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    tokens, _ = draw(LOGITS.expand(draws, -1), alike(sampling, draws), uniform)
    counts = torch.bincount(tokens, minlength=8)
    assert counts.sum() == counts[allowed].sum() == draws
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum().item()
    assert chi_square < CHI_SQUARE_1E4[len(allowed) - 1]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_logprobs_are_tempered_and_uncut(temperature: float, cut: dict[str, float]) -> None:
    draws = 50
    sampling = params(temperature=temperature, **cut)
    uniform = torch.arange(draws) / draws
    tokens, logprobs = draw(LOGITS.expand(draws, -1), alike(sampling, draws), uniform)
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS / temperature, -1)[tokens])


def test_temperature_zero_takes_the_likeliest_and_counts_as_one() -> None:
    uniform = torch.tensor([0.0, 0.5, 0.999999])
    tokens, logprobs = draw(LOGITS.expand(3, -1), rows_of(*[params(temperature=0.0)] * 3), uniform)
    assert tokens.tolist() == [0, 0, 0]
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[:1].expand(3))


@pytest.mark.parametrize("least", [{"temperature": 1e-39}, {"temperature": 1e-46}, {"top_p": 1e-46}])
def test_parameters_too_small_for_fp32_take_the_likeliest_token(least: dict[str, float]) -> None:
    """Such values must not act as 0, or as the inverse of infinity."""
    tokens, logprobs = draw(LOGITS[None], rows_of(params(**least)), torch.tensor([0.99], dtype=torch.float64))
    wanted = torch.log_softmax(LOGITS / max(1e-9, least.get("temperature", 1.0)), -1)[0]
    assert (tokens.item(), logprobs.item()) == (0, pytest.approx(wanted.item()))


def test_temperature_too_large_for_fp32_makes_all_tokens_equally_likely() -> None:
    logits = torch.tensor([[5.0, -torch.inf, 0.0, 1.0]])
    rows = rows_of(params(temperature=1e300))
    for uniform, expected in ((0.1, 0), (0.5, 2), (0.9, 3)):
        token, log_prob = draw(logits, rows, torch.tensor([uniform], dtype=torch.float64))
        assert token.item() == expected
        assert log_prob.item() == pytest.approx(-np.log(3))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_never_draw_cut_tokens(uniform: float) -> None:
    """The kept tokens are in the middle: a rounding error at either end would draw a token of probability 0."""
    logits = torch.tensor([[-4.0, -2.0, 1.0, 2.0, 0.5, -1.0, -4.0]])
    tokens, _ = draw(logits, rows_of(params(top_k=3)), torch.tensor([uniform], dtype=torch.float64))
    assert tokens.item() in {2, 3, 4}


def test_each_row_obeys_its_own_parameters() -> None:
    """Rows mixed in one batch draw the same tokens as alone."""
    samplings = [params(**cut, temperature=t) for cut in CUTS for t in (0.0, 0.5, 1.5)]
    uniform = torch.rand(len(samplings), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = draw(LOGITS.expand(len(samplings), -1), rows_of(*samplings), uniform)
    for row, sampling in enumerate(samplings):
        alone: tuple[Tensor, Tensor] = draw(LOGITS[None], rows_of(sampling), uniform[row : row + 1])
        assert together[0][row] == alone[0][0], sampling
        torch.testing.assert_close(together[1][row], alone[1][0])


# Answers that may not end yet


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_answer_that_may_not_end_yet_draws_as_without_end_tokens(cut: dict[str, float], temperature: float) -> None:
    """Log-probs cover all tokens. Neighbouring rows that may end draw from all tokens."""
    ends = [0, 3]  # the likeliest one is among them
    sampling = params(temperature=temperature, **cut).model_copy(update={"stop_tokens": (0, 3)})
    uniform = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    count = torch.arange(400) % 2
    held = count < 1
    least = sampling.model_copy(update={"min_new_tokens": 1})
    tokens, logprobs = draw(LOGITS.expand(400, -1), rows_of(*[least] * 400), uniform, count)

    others = [token for token in range(len(LOGITS)) if token not in [*ends, END]]
    rest = LOGITS[others].double()
    allowed = cut_by_definition((rest / (temperature or 1.0)).softmax(-1).tolist(), sampling)
    seen = {*tokens[held].tolist()}
    assert seen == ({others[0]} if temperature == 0 else {others[index] for index in allowed})
    free, free_logprobs = draw(LOGITS.expand(400, -1), rows_of(*[sampling] * 400), uniform)
    assert torch.equal(tokens[~held], free[~held])
    assert torch.equal(logprobs[~held], free_logprobs[~held])
    expected = (LOGITS.double() / (temperature or 1.0)).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-6)


def test_answer_continues_although_the_model_is_certain_of_the_end() -> None:
    """All other probabilities are 0 in fp32."""
    logits = torch.full((1, 8), -1000.0)
    logits[0, END], logits[0, 4] = 0.0, -500.0
    tokens, logprobs = draw(logits, rows_of(params(min_new_tokens=1)), torch.tensor([0.5]))
    assert tokens.item() == 4
    assert logprobs.item() == pytest.approx(-500.0)
