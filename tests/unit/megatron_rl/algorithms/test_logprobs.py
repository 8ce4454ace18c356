"""Log-probs computed chunk by chunk match one softmax in float64, and so do their gradients."""

from __future__ import annotations

import pytest
import torch
from tensor_peak import Peak
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.algorithms import logprobs as module
from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.model.policy import OutputPart

TOKENS, HIDDEN, ROWS, VOCABULARY = 23, 12, 40, 37  # three rows pad the vocabulary


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets, and the gradient of the log-probs; the logits are from -30 to 30."""
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=draw) * 2
    weight = torch.randn(ROWS, HIDDEN, generator=draw)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(TOKENS, generator=draw)


def exact(hidden: Tensor, weight: Tensor, targets: Tensor, gradient: Tensor, temperature: float) -> list[Tensor]:
    """Log-probs, entropy and both gradients, in float64."""
    hidden, weight = (each.double().requires_grad_() for each in (hidden, weight))
    every = torch.log_softmax((hidden @ weight.t())[:, :VOCABULARY] / temperature, dim=-1)
    chosen = every[torch.arange(len(targets)), targets]
    chosen.backward(gradient.double())
    assert hidden.grad is not None
    assert weight.grad is not None
    return [chosen.detach(), -(every.exp() * every).sum(-1).detach(), hidden.grad, weight.grad]


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, gradient: Tensor, temperature: float) -> list[Tensor]:
    hidden, weight = (each.clone().requires_grad_() for each in (hidden, weight))
    output = OutputPart(weight, range(VOCABULARY), None)
    chosen, entropy = predicted_logprobs(hidden, output, targets, temperature)
    assert entropy is not None
    assert not entropy.requires_grad
    chosen.backward(gradient)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [chosen.detach(), entropy, hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_fp32_results_match_float64(monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    given = inputs(torch.float32)
    for found, expected in zip(ours(*given, temperature), exact(*given, temperature), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [5, 100])
def test_an_output_layer_in_fp32_is_exact_for_weights_in_bf16(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    hidden, weight, targets, gradient = inputs(torch.bfloat16)
    expected = exact(hidden, weight, targets, gradient, 1.0)
    errors = {}
    for in_fp32 in (False, True):
        trained = weight.clone().requires_grad_()
        output = OutputPart(trained, range(VOCABULARY), None, in_fp32)
        chosen, _ = predicted_logprobs(hidden, output, targets, 1.0)
        chosen.backward(gradient)
        errors[in_fp32] = (chosen.detach() - expected[0]).abs().max().item()
        assert trained.grad is not None and trained.grad.dtype == torch.bfloat16
        torch.testing.assert_close(trained.grad.double(), expected[3], rtol=0.05, atol=0.05)
    assert errors[True] < 1e-5 < 1e-3 < errors[False]


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradient_of_the_entropy_matches_float64(
    monkeypatch: pytest.MonkeyPatch, chunk: int, temperature: float
) -> None:
    """The loss is a sum of log-probs and entropies with random factors."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    hidden, weight, targets, of_logprobs = inputs(torch.float32)
    of_entropy = torch.randn(TOKENS, generator=torch.Generator().manual_seed(4))
    found, expected = [], []
    ours = [each.clone().requires_grad_() for each in (hidden, weight)]
    chosen, entropy = predicted_logprobs(
        ours[0], OutputPart(ours[1], range(VOCABULARY), None), targets, temperature, entropy="gradient"
    )
    assert entropy is not None
    (chosen @ of_logprobs + entropy @ of_entropy).backward()
    found += [entropy.detach(), *(each.grad for each in ours)]
    exact = [each.double().requires_grad_() for each in (hidden, weight)]
    every = torch.log_softmax((exact[0] @ exact[1].t())[:, :VOCABULARY] / temperature, dim=-1)
    entropies = -(every.exp() * every).sum(-1)
    (every[torch.arange(TOKENS), targets] @ of_logprobs.double() + entropies @ of_entropy.double()).backward()
    expected += [entropies.detach(), *(each.grad for each in exact)]
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("chunk", [5, 100])
def test_in_bf16_the_softmax_is_fp32(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """The remaining error is the rounding of the logits; the largest have a step of 0.125."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    given = inputs(torch.bfloat16)
    logprobs, _, of_hidden, of_weight = ours(*given, 1.0)
    expected, _, exact_of_hidden, exact_of_weight = exact(*given, 1.0)
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=0.125)
    for found, exactly in ((of_hidden, exact_of_hidden), (of_weight, exact_of_weight)):
        assert found.dtype == torch.bfloat16
        assert (found.double() - exactly).norm() < 0.05 * exactly.norm()


def test_weight_gradient_of_bf16_chunks_is_summed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 chunks of one token each: summed in bf16 their gradients would stop growing."""
    tokens = 512
    hidden = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    weight = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS)
    chosen, _ = predicted_logprobs(
        hidden, OutputPart(weight, range(VOCABULARY), None), torch.zeros(tokens, dtype=torch.long), 1.0
    )
    chosen.sum().backward()
    assert weight.grad is not None
    assert weight.grad[0, 0].item() == pytest.approx(tokens * (1 - 1 / VOCABULARY), rel=5e-3)


@pytest.mark.parametrize("chunk", [5, 100])
def test_no_targets_give_zero_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4 * ROWS * chunk)
    hidden, weight, targets, gradient = inputs(torch.float32)
    found = ours(hidden[:0], weight, targets[:0], gradient[:0], 1.0)
    assert [len(each) for each in found] == [0, 0, 0, ROWS]
    assert not found[3].any()


def test_temperature_0_counts_as_1_and_entropy_is_optional() -> None:
    hidden, weight, targets, _ = inputs(torch.float32)
    output = OutputPart(weight, range(VOCABULARY), None)
    for chunked in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "CHUNK_BYTES", 4 * ROWS * (5 if chunked else 100))
            greedy, entropy = predicted_logprobs(hidden, output, targets, 0.0, entropy="none")
            assert entropy is None
            assert torch.equal(greedy, predicted_logprobs(hidden, output, targets, 1.0)[0])


@pytest.mark.parametrize(
    ("tensor_parallel", "scoring", "training"), [(1, 0.51, 4.9), (8, 0.51, 1.1)], ids=["whole", "an eighth"]
)
def test_12k_tokens_of_a_vocabulary_of_152k_take_this_many_gib(
    tensor_parallel: int, scoring: float, training: float
) -> None:
    """Peak with bf16, hidden size 5,120 and gradients, of which that of the weight exists once in fp32. With all logits
    at once it would be 31 and 3.8 GiB."""
    tokens, hidden_size, rows = 12_000, 5_120, 152_064 // tensor_parallel
    with FakeTensorMode(allow_non_fake_inputs=True):
        hidden, weight = (
            torch.empty(size, hidden_size, dtype=torch.bfloat16, requires_grad=True) for size in (tokens, rows)
        )
        targets, gradient = torch.empty(tokens, dtype=torch.long), torch.empty(tokens)
        output = OutputPart(weight, range(rows), None)
        with Peak(hidden, weight, targets, gradient) as peak:
            with torch.no_grad():
                predicted_logprobs(hidden, output, targets, 1.0, entropy="none")
            assert peak.bytes < scoring * 2**30
            predicted_logprobs(hidden, output, targets, 1.0)[0].backward(gradient)
        assert peak.bytes < training * 2**30
