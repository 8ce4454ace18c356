"""A device that does not exist: it counts memory, and training on it has the CPU's shapes and memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import Linear, Parameter
from torch.utils.checkpoint import checkpoint

from megatron_rl.model.platform.attention import PLAIN, AttentionForm, whole_sequences
from megatron_rl.model.platform.phantom import ACCELERATOR, PhantomCuda, PhantomDevice, PhantomKernels

KIB = 1024


@pytest.fixture
def device() -> Iterator[PhantomDevice]:
    with PhantomDevice() as device:
        yield device


def kib(count: int) -> torch.Tensor:
    return torch.empty(count * KIB, dtype=torch.uint8, device=ACCELERATOR)


def test_a_peak_is_the_largest_sum_held_at_once(device: PhantomDevice) -> None:
    kept = kib(1)
    with device.memory.watched() as peak:
        first = kib(4)
        view = first[KIB:]  # shares its storage
        del first
        assert peak.bytes == 5 * KIB
        del view
        second = kib(3)
        torch.zeros(100_000)  # on the CPU
        del second
    assert (peak.bytes, kept.numel()) == (5 * KIB, KIB)


def test_bytes_are_counted_by_holder(device: PhantomDevice) -> None:
    memory = device.memory
    with memory.watched() as peak:
        with memory.held_by("optimizer"):
            state, buffer = kib(2), kib(3)
        output = kib(1)
        assert peak.held_by == {"optimizer": 5 * KIB, "activations": KIB}
        memory.assign("gradients", [buffer])
        assert peak.held_by == {"optimizer": 2 * KIB, "activations": KIB, "gradients": 3 * KIB}
        del output
        late = kib(1)
        memory.assign("KV cache", [late])
    assert peak.held_by["KV cache"] == 0, "it was not there at the peak"
    with memory.watched() as now:
        pass
    assert +now.held_by == {"optimizer": 2 * KIB, "gradients": 3 * KIB, "KV cache": KIB}
    del state


def test_a_nested_peak_does_not_count_outside(device: PhantomDevice) -> None:
    with device.memory.watched() as outer:
        with device.memory.watched() as inner:
            kib(8)
        kib(2)
    assert (inner.bytes, outer.bytes) == (8 * KIB, 2 * KIB)


def test_gradients_and_their_memory_are_those_of_the_cpu(device: PhantomDevice) -> None:
    layer = Linear(KIB, 4, device=ACCELERATOR)
    output = layer(torch.empty(2, KIB, device=ACCELERATOR))
    with device.memory.watched() as peak:
        output.sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad.shape, layer.weight.grad.device) == ((4, KIB), ACCELERATOR)
    before = 4 * (4 * KIB + 4) + 4 * 2 * KIB + 4 * 2 * 4
    assert before + 4 * 4 * KIB <= peak.bytes <= before + 4 * 4 * KIB + KIB


@pytest.mark.parametrize("again", [False, True], ids=["once", "computed again in the backward pass"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_holds_no_scores(device: PhantomDevice, dtype: torch.dtype, *, again: bool, sinks: bool) -> None:
    """A [length, length] matrix would be 8 MiB for each of them."""

    layout = PhantomKernels(device.device).attention_layout(whole_sequences([2048]), dtype, sinks=sinks)
    form = AttentionForm(window=128, sinks=torch.zeros(2, device=ACCELERATOR)) if sinks else PLAIN

    def attend(query: torch.Tensor) -> torch.Tensor:
        return layout.attend(1, query, query, query, form)

    query = Parameter(torch.empty(2048, 2, 16, dtype=dtype, device=ACCELERATOR))
    with device.memory.watched() as peak:
        output = checkpoint(attend, query, use_reentrant=False, preserve_rng_state=False) if again else attend(query)
        output.sum().backward()
    assert query.grad is not None
    assert peak.bytes < 2**22


def test_the_host_may_find_all_values_nonzero() -> None:
    with PhantomDevice(reads_ones=True) as device, device.memory.watched() as peak:
        index = (torch.empty(3, KIB, device=ACCELERATOR) > 0).nonzero()
        assert (index.shape, index.dtype, index.device) == ((3 * KIB, 2), torch.int64, ACCELERATOR)
    assert peak.bytes >= 8 * 2 * 3 * KIB


def test_a_module_is_built_with_weights_of_the_device_and_type(device: PhantomDevice) -> None:
    built = PhantomCuda(device).build(lambda: Linear(8, 4), torch.bfloat16)
    assert (built.weight.device, built.weight.dtype, built.weight.requires_grad) == (ACCELERATOR, torch.bfloat16, True)
    with device.memory.watched() as peak:
        pass
    assert peak.held_by == {"weights": 2 * (8 * 4 + 4)}


def test_patches_are_undone_on_exit() -> None:
    from megatron.core.optimizer import clip_grads

    before = clip_grads.torch, clip_grads.l2_norm_impl
    with PhantomDevice() as device:
        PhantomCuda(device).build(lambda: Linear(2, 2), torch.float32)
        assert clip_grads.l2_norm_impl is not before[1]
    assert (clip_grads.torch, clip_grads.l2_norm_impl) == before
    if not torch.cuda.is_available():
        with pytest.raises((RuntimeError, AssertionError)):
            torch.zeros(1, device=ACCELERATOR) + 1
