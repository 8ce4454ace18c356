"""Divergences computed chunk by chunk are those of TRL in float64, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from optional import needs
from tensor_peak import Peak
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.algorithms import logprobs as logprobs_module
from megatron_rl.algorithms.allowed_tokens import AllowedTokens
from megatron_rl.algorithms.divergences import TopTokens, WholeVocabulary, divergences, top_tokens
from megatron_rl.model.policy import OutputPart
from megatron_rl.recipe.distill import DivergenceConfig

TOKENS, HIDDEN, ROWS, VOCABULARY = 23, 12, 40, 37  # three rows pad the vocabulary
TEACHERS_HIDDEN = 9
KINDS = {
    "forward": (DivergenceConfig(kind="forward"), 0.0),
    "reverse": (DivergenceConfig(kind="reverse"), 1.0),
    "js": (DivergenceConfig(kind="js", beta=0.3), 0.3),
}  # with the beta of TRL


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and output layer of the policy and of the teacher, and the gradient of the divergences."""
    draw = torch.Generator().manual_seed(3)
    sizes = (TOKENS, HIDDEN), (ROWS, HIDDEN), (TOKENS, TEACHERS_HIDDEN), (ROWS, TEACHERS_HIDDEN), (TOKENS,)
    hidden, weight, of_teacher, teachers, gradient = (torch.randn(size, generator=draw) for size in sizes)
    return 0.6 * hidden, weight, 0.6 * of_teacher, teachers, gradient


def exact_logits(*given: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits of policy and teacher / temperature, float64."""
    hidden, weight, of_teacher, teachers = (each.double() for each in given)
    both = hidden @ weight.t(), of_teacher @ teachers.t()
    return both[0][:, :VOCABULARY] / temperature, both[1][:, :VOCABULARY] / temperature


def compared(config: DivergenceConfig, temperature: float, expected_of: Any) -> None:
    """Compare divergences and both gradients with those of a function of the exact logits, [tokens]."""
    hidden, weight, of_teacher, teachers, gradient = drawn()
    ours = [each.clone().requires_grad_() for each in (hidden, weight)]
    output = OutputPart(ours[1], range(VOCABULARY), None)
    judge = OutputPart(teachers, range(VOCABULARY), None)
    teacher: WholeVocabulary | TopTokens = WholeVocabulary(of_teacher, judge)
    if config.top_k is not None:
        teacher = top_tokens(of_teacher, judge, config.top_k, temperature)
    found = divergences(ours[0], output, teacher, config, temperature)
    (found @ gradient).backward()
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    expected = expected_of(*exact_logits(*exact, of_teacher, teachers, temperature=temperature))
    (expected @ gradient.double()).backward()
    for one, other in zip((found, *ours), (expected, *exact), strict=True):
        one, other = (one, other) if one is found else (one.grad, other.grad)  # type: ignore[assignment]
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@needs("trl")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [5, 100])
def test_over_the_whole_vocabulary_they_are_those_of_trl(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.gkd import GKDTrainer

    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 8 * ROWS * chunk)
    config, beta = KINDS[kind]

    def of_trl(policy: Tensor, teacher: Tensor) -> Tensor:
        """Logits are divided by the temperature already."""
        pairs = zip(policy, teacher, strict=True)
        return torch.stack(
            [
                GKDTrainer.generalized_jsd_loss(*(each[None] for each in pair), beta=beta, reduction="sum")
                for pair in pairs
            ]
        )

    compared(config, 0.7, of_trl)


@needs("trl")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [5, 100])
def test_over_the_likeliest_tokens_they_are_those_of_trl(
    monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from trl.experimental.sdpo.loss_utils import add_tail_bucket, compute_divergence

    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 8 * ROWS * chunk)
    config, beta = KINDS[kind]

    def of_trl(policy: Tensor, teacher: Tensor) -> Tensor:
        policy, teacher = policy.log_softmax(-1), teacher.log_softmax(-1)
        best = teacher.topk(4, dim=-1).indices
        return compute_divergence(
            add_tail_bucket(policy.gather(1, best)), add_tail_bucket(teacher.gather(1, best)), beta
        )

    compared(config.model_copy(update={"top_k": 4}), 1.3, of_trl)


def test_they_are_taken_among_the_tokens_that_could_be_drawn() -> None:
    """Token 2 could be any of the even ones. All others are as without a grammar."""
    hidden, weight, of_teacher, teachers, _ = drawn()
    even = [int("01010101", 2)] * 5
    allowed = AllowedTokens(torch.tensor([[255] * 5, even], dtype=torch.uint8), (torch.arange(TOKENS) == 2).long())
    output, judge = OutputPart(weight, range(VOCABULARY), None), OutputPart(teachers, range(VOCABULARY), None)
    policy, teacher = exact_logits(hidden, weight, of_teacher, teachers, temperature=1.0)
    for config, _ in KINDS.values():
        every = divergences(hidden, output, WholeVocabulary(of_teacher, judge), config, 1.0)
        found = divergences(hidden, output, WholeVocabulary(of_teacher, judge), config, 1.0, allowed=allowed)
        likeliest = top_tokens(of_teacher, judge, 36, 1.0, allowed=allowed)  # more than are allowed
        of_top = divergences(hidden, output, likeliest, config, 1.0, allowed=allowed)
        both = policy[2, ::2].log_softmax(0), teacher[2, ::2].log_softmax(0)
        assert found[2].item() == pytest.approx(terms_of(config, *both).item(), rel=1e-5)
        torch.testing.assert_close(of_top, found, rtol=1e-5, atol=1e-6)
        others = torch.arange(TOKENS) != 2
        assert torch.equal(found[others], every[others])


def terms_of(config: DivergenceConfig, policy: Tensor, teacher: Tensor) -> Tensor:
    """The divergence from its definition."""
    share = {"forward": 0.0, "reverse": 1.0, "js": config.beta}[config.kind]
    p, q = teacher.exp(), policy.exp()
    if config.kind != "js":
        return (1 - share) * (p * (p / q).log()).sum() + share * (q * (q / p).log()).sum()
    m = share * p + (1 - share) * q
    return share * (p * (p / m).log()).sum() + (1 - share) * (q * (q / m).log()).sum()


@pytest.mark.parametrize("top_k", [None, 4])
def test_no_tokens_give_zero_gradients(top_k: int | None) -> None:
    hidden, weight, of_teacher, teachers, _ = drawn()
    judge = OutputPart(teachers, range(VOCABULARY), None)
    none = of_teacher[:0]
    teacher = WholeVocabulary(none, judge) if top_k is None else top_tokens(none, judge, top_k, 1.0)
    weight.requires_grad_()
    config = DivergenceConfig(kind="js", top_k=top_k)
    found = divergences(hidden[:0].requires_grad_(), OutputPart(weight, range(VOCABULARY), None), teacher, config, 1.0)
    found.sum().backward()
    assert len(found) == 0 and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(("top_k", "peak_gib"), [(None, 1.4), (64, 1.0)])
def test_12k_tokens_of_a_vocabulary_of_152k_take_this_many_gib(top_k: int | None, peak_gib: float) -> None:
    """Peak on one of eight tensor-parallel ranks, with bf16 and gradients. All logits of both models at once would take
    1.7 GiB in fp32, and several times as much with what is made of them."""
    tokens, hidden_size, rows = 12_000, 5_120, 152_064 // 8
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, weight, of_teacher, teachers = (
            torch.empty(size, hidden_size, dtype=torch.bfloat16) for size in (tokens, rows) * 2
        )
        judge = OutputPart(teachers, range(rows), None)
        hidden.requires_grad_()
        weight.requires_grad_()
        with Peak(hidden, weight, of_teacher, teachers) as peak:
            teacher = WholeVocabulary(of_teacher, judge) if top_k is None else top_tokens(of_teacher, judge, top_k, 1.0)
            config = DivergenceConfig(kind="js", top_k=top_k)
            found = divergences(hidden, OutputPart(weight, range(rows), None), teacher, config, 1.0)
            found.backward(torch.empty(tokens))
        assert peak.bytes < peak_gib * 2**30
