"""The parts of a gated delta net compute what those of `transformers` do; test_model.py compares whole models."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rl.model.platform.delta_rule import ConsecutiveSequences, PlainDelta
from megatron_rl.model.platform.fla_delta import FlaDelta
from megatron_rl.model.platform.phantom import PhantomDevice
from megatron_rl.model.platform.phantom_delta import phantom_delta


def test_the_delta_rule_in_chunks_is_that_of_single_tokens() -> None:
    """Sequences of less and more than a chunk start from a memory of their own and leave one."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    torch.manual_seed(0)
    lengths = [3, 150, 64, 1]
    tokens = sum(lengths)
    query, key = (torch.randn(tokens, 2, 8, requires_grad=True) for _ in range(2))
    value = torch.randn(tokens, 4, 6, requires_grad=True)
    decay, beta = (-torch.rand(tokens, 4)).requires_grad_(), torch.rand(tokens, 4, requires_grad=True)
    memory = torch.randn(4, 4, 8, 6, requires_grad=True)
    inputs = (query, key, value, decay, beta)

    sequences = ConsecutiveSequences(lengths, memory.device)
    out, left = PlainDelta().delta_rule(inputs[:3], decay, beta, sequences, memory)
    alone = [
        torch_recurrent_gated_delta_rule(
            *(each[None] for each in of_sequence),
            initial_state=memory[number : number + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for number, of_sequence in enumerate(zip(*(each.split(lengths) for each in inputs), strict=True))
    ]
    expected, expected_left = torch.cat([each[0] for each, _ in alone]), torch.cat([each for _, each in alone])
    torch.testing.assert_close((out, left), (expected, expected_left), rtol=1e-5, atol=1e-5)

    weights = torch.randn_like(out), torch.randn_like(left)
    ours, theirs = (
        torch.autograd.grad(tuple(both), (*inputs, memory), weights)
        for both in ((out, left), (expected, expected_left))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_convolution_continues_from_what_it_left() -> None:
    torch.manual_seed(0)
    tokens, weight, plain = torch.randn(7, 5), torch.randn(5, 4), PlainDelta()

    def of(rows: Tensor, *lengths: int, history: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return plain.convolved(rows, weight, ConsecutiveSequences(lengths, rows.device), history)

    whole, left = of(tokens, 7)
    first, history = of(tokens[:2], 2)
    then, last = of(tokens[2:], 5, history=history)
    torch.testing.assert_close((torch.cat((first, then)), last), (whole, left))
    assert torch.equal(left, tokens[None, 4:])
    torch.testing.assert_close(of(tokens.repeat(2, 1), 7, 7)[0], whole.repeat(2, 1))


def test_kernels_of_a_gpu_get_what_they_need() -> None:
    """The stand-ins have the interfaces of flash-linear-attention and causal-conv1d, as transformers calls them."""
    from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

    def rule(*heads: Tensor, initial_state: Tensor, cu_seqlens: Tensor, **same: bool) -> tuple[Tensor, Tensor]:
        parts = [each.split(cu_seqlens.diff().tolist(), dim=1) for each in heads]
        found = [
            torch_chunk_gated_delta_rule(*each, initial_state=initial_state[number : number + 1], **same)
            for number, each in enumerate(zip(*parts, strict=True))
        ]
        return torch.cat([out for out, _ in found], dim=1), torch.cat([left for _, left in found])

    def convolve(tokens: Tensor, weight: Tensor, *, seq_idx: Tensor, activation: str) -> Tensor:
        parts = tokens.split(seq_idx[0].bincount().tolist(), dim=2)
        return torch.cat([causal_conv1d_fn(each, weight, activation=activation) for each in parts], dim=2)

    torch.manual_seed(0)
    plain, fast, sequences = (
        PlainDelta(),
        FlaDelta(rule, convolve),
        ConsecutiveSequences([3, 70, 1], torch.device("cpu")),
    )
    tokens, weight = torch.randn(74, 6), torch.randn(6, 4)
    torch.testing.assert_close(
        fast.convolved(tokens, weight, sequences, None), plain.convolved(tokens, weight, sequences, None)
    )
    query, key, value = (torch.randn(74, heads, 8).bfloat16() for heads in (2, 2, 4))
    decay, beta, memory = -torch.rand(74, 4), torch.rand(74, 4), torch.randn(3, 4, 8, 8)
    found, expected = (
        kernels.delta_rule((query, key, value), decay, beta, sequences, memory) for kernels in (fast, plain)
    )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_a_rehearsal_allocates_what_the_kernel_of_a_gpu_does() -> None:
    """The sizes are those of the tensors in fla-core 0.6, of 130 tokens in two sequences, at most 4 chunks of them."""
    tokens, heads, key, value = 130, 4, 16, 32
    of_keys, of_values, of_states = (2 * heads * each for each in (tokens * key, tokens * value, 4 * key * value))
    inputs = 2 * of_keys + of_values + 2 * 4 * tokens * heads  # decay and beta in fp32
    within = of_keys + 2 * of_values + of_states  # w, u, v_new, h
    with PhantomDevice() as device:
        made = [torch.empty(tokens, heads, size, dtype=torch.bfloat16, device="meta") for size in (key, key, value)]
        made += [torch.empty(tokens, heads, device="meta") for _ in range(2)]
        query, keys, values, decay, beta = (device.empty(each).requires_grad_() for each in made)
        sequences = ConsecutiveSequences([100, 30], device.device)
        with device.memory.watched() as forward:
            out, left = phantom_delta().delta_rule((query, keys, values), decay, beta, sequences, None)
        of_chunks = 2 * tokens * heads * 64  # the one tensor that the kernel keeps beside its inputs
        held = inputs + of_chunks + of_values + left.nbytes
        assert held + within <= forward.bytes < 1.2 * (held + within)
        with device.memory.watched() as backward:
            out.backward(torch.empty_like(out))
        needed = held + 2 * within + inputs + of_keys + of_values  # gradients of both, of the inputs and of the result
        assert needed <= backward.bytes < 1.2 * needed
