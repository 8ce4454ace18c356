"""GPU attention as far as it can be tested without a GPU: inputs and outputs of its kernels, the choice between them,
and FlexAttention as torch computes it on a CPU."""

from __future__ import annotations

import sys
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attention_formula import by_definition, forms, seen_in_trees
from examples import examples
from flash_attn_stand_in import FLASH_ATTN, package
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from megatron_rl.algorithms.packing import MicroBatch, pack
from megatron_rl.model.platform import tree_attention
from megatron_rl.model.platform.attention import AttentionForm, PackedSequences, whole_sequences
from megatron_rl.model.platform.cuda_attention import CudaAttention, VarlenLayout, tree_is_faster, varlen_layout
from megatron_rl.model.platform.device import UnsupportedPlatform
from megatron_rl.model.platform.flash_kernels import VarlenKernel, find_varlen_kernel
from megatron_rl.model.platform.phantom import PhantomDevice
from megatron_rl.model.platform.tree_attention import FEWEST_TOKENS, TreeLayout, tree_layout

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 16


def random_qkv(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(tokens, heads, HEAD_SIZE, generator=generator).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's uncompiled FlexAttention compute gradients on a CPU, where its own check refuses them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def causal_in_sequences(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, form: AttentionForm
) -> Tensor:
    """Reference result of every kernel for variable lengths."""
    assert cu_seqlens.dtype is torch.int32
    edges = cu_seqlens.tolist()
    assert (edges[-1], longest) == (len(query), max(stop - first for first, stop in pairwise(edges)))
    sequence = torch.arange(len(edges) - 1).repeat_interleave(cu_seqlens.diff())
    visible = (sequence == sequence[:, None]) & torch.ones(len(query), len(query)).tril().bool()
    return by_definition(query, key, value, visible, form).view(query.shape).to(query.dtype)


def answers_to(prompt: list[int], answers: list[list[int]]) -> MicroBatch:
    rows = [prompt + answer for answer in answers]
    masks = [[False] * len(prompt) + [True] * len(answer) for answer in answers]
    (micro,) = pack(rows, masks, range(len(rows)), 10**6)
    return micro


TREES = st.builds(
    answers_to,
    st.lists(st.integers(3, 9), min_size=1, max_size=20),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6),
)


@examples(20)
@given(TREES, forms(HEADS, sinks=False), st.sampled_from([HEAD_SIZE, 10]))
def test_each_branch_is_a_sequence_of_the_flash_kernel(micro: MicroBatch, form: AttentionForm, value_size: int) -> None:
    query, key, value = random_qkv(len(micro.tokens))
    value = value[..., :value_size]
    attended = varlen_layout(micro, CPU, causal_in_sequences).attend(1, query, key, value, form)
    torch.testing.assert_close(attended.double(), by_definition(query, key, value, seen_in_trees(micro), form))


def test_sequences_without_sharing_are_not_gathered() -> None:
    lengths = [5, 1, 7]
    layout = varlen_layout(whole_sequences(lengths), CPU, causal_in_sequences)
    assert layout.branches is None
    assert layout.cu_seqlens.tolist() == [0, 5, 6, 13]
    query, key, value = random_qkv(sum(lengths))
    expected = by_definition(query, key, value, seen_in_trees(whole_sequences(lengths)))
    torch.testing.assert_close(layout.attend(1, query, key, value).double(), expected)


def varlen_attn_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    raise AssertionError("it knows no grouped queries")


OLD_TORCH = {
    "torch.nn.attention.varlen": package("torch.nn.attention.varlen", varlen_attn=varlen_attn_of_torch_2_11),
}
NOTHING_ELSE = {"flash_attn": None, "transformer_engine": None}


def test_torchs_own_kernel_takes_grouped_queries_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the real kernel on fake tensors, which check shapes, dtypes and devices."""
    for module in NOTHING_ELSE:
        monkeypatch.setitem(sys.modules, module, None)
    kernel = find_varlen_kernel()
    if torch.__version__ < (2, 12):
        assert kernel is None
        pytest.skip("torch has had grouped queries since 2.12")
    assert kernel is not None
    assert kernel.name == f"torch {torch.__version__} varlen_attn"
    with PhantomDevice(GPU) as gpu:
        layout = varlen_layout(answers_to([3] * 9, [[1], [2, 2]]), GPU, kernel.attend)
        qkv = [torch.empty(10, heads, HEAD_SIZE, dtype=torch.bfloat16, device=GPU) for heads in (HEADS, 2, 2)]
        waits = gpu.waits
        attended = layout.attend(1, *qkv)
        assert gpu.waits == waits
    assert (attended.shape, attended.dtype, attended.device) == ((10, HEADS * HEAD_SIZE), torch.bfloat16, GPU)


def test_flex_attention_is_used_without_any_kernel_for_variable_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module, stand_in in (OLD_TORCH | NOTHING_ELSE).items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    assert find_varlen_kernel() is None
    attention = CudaAttention(None)
    assert isinstance(attention.layout(whole_sequences([3, 4]), CPU, torch.bfloat16), TreeLayout)
    missing = "flash-attn 2.7.4, Transformer Engine 2.4 and torch 2.12 are all missing"
    assert attention.description.startswith(f"FlexAttention, since {missing}; pages by")


def test_a_package_with_a_missing_library_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "transformer_engine", Broken("transformer_engine"))
    for module, stand_in in FLASH_ATTN.items():
        monkeypatch.setitem(sys.modules, module, stand_in)
    kernel = find_varlen_kernel()
    assert kernel is not None
    assert kernel.name.startswith("flash-attn")


# FlexAttention


@examples(10)
@given(
    prompt=st.integers(1, 300),
    answers=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    alone=st.lists(st.integers(1, 300), max_size=2),
)
def test_blocks_are_those_that_torch_finds_token_by_token(prompt: int, answers: list[int], alone: list[int]) -> None:
    rows = [[3] * prompt + [number] * answer for number, answer in enumerate(answers)] + [
        [5] * length for length in alone
    ]
    masks = [[False] + [True] * (len(row) - 1) for row in rows]
    (micro,) = pack(rows, masks, range(len(rows)), 10**6)
    mask = tree_layout(micro, CPU).mask
    tokens = max(len(micro.tokens), FEWEST_TOKENS)
    expected = flex.create_block_mask(mask.mask_mod, None, None, tokens, tokens, device="cpu")
    assert mask.shape == expected.shape
    for kind in ("kv", "q", "full_kv", "full_q"):
        for name in (f"{kind}_num_blocks", f"{kind}_indices"):
            assert torch.equal(getattr(mask, name), getattr(expected, name)), name


def test_trees_attend_in_place_with_a_kernel_that_is_not_compiled_for_each() -> None:
    """Compares with a formula in float64, on a CPU. torch compiles again when it learns that the number of blocks may
    differ from that of key/value heads."""
    from torch._dynamo.testing import CompileCounter  # slow to import

    counter = CompileCounter()
    compiled = torch.compile(flex.flex_attention, dynamic=True, backend=counter)

    trees = [answers_to([7] * 100, [[number] * 30 for number in range(answers)]) for answers in (3, 1, 6, 9, 4)]
    for packed in (whole_sequences([1]), *trees, whole_sequences([3, 4])):
        query, key, value = random_qkv(len(packed.subtree_ends))
        attended = tree_layout(packed, CPU, compiled).attend(1, query, key, value)
        expected = by_definition(query, key, value, seen_in_trees(packed)).float()
        torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    assert counter.frame_count == 2


def test_many_kernels_of_a_process_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its limit torch would attend uncompiled and store all scores."""
    from torch._dynamo.testing import CompileCounter  # slow to import

    counter = CompileCounter()
    monkeypatch.setattr(tree_attention, "_compiled", partial(torch.compile, flex.flex_attention, backend=counter))
    layout = tree_layout(whole_sequences([5]), CPU)
    with torch._dynamo.config.patch(recompile_limit=1):
        for heads in (1, 2):
            layout.attend(1, *(torch.randn(5, heads, HEAD_SIZE) for _ in range(3)))
    assert counter.frame_count == 2


def test_a_part_of_the_tokens_attends_to_all_that_it_sees_of_trees_cut_anywhere() -> None:
    """Compares every other chunk of some hundred tokens, as on context-parallel ranks, with a formula in float64."""
    micro = answers_to([7] * 150, [[number] * 140 for number in range(3)])
    tokens = len(micro.tokens)
    part = torch.cat([torch.arange(first, min(first + 97, tokens)) for first in range(20, tokens, 230)])
    query, key, value = random_qkv(tokens)
    layout = CudaAttention(None, flex.flex_attention).layout(micro, CPU, torch.bfloat16, part)
    attended = layout.attend(1, query[part], key, value)
    expected = by_definition(query[part], key, value, seen_in_trees(micro)[part])
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(layout, TreeLayout)
    computed = layout.mask.kv_num_blocks.sum() + layout.mask.full_kv_num_blocks.sum()
    assert computed < layout.mask.kv_num_blocks.numel() * -(-tokens // 128)  # blocks that nothing sees are skipped


@pytest.mark.usefixtures("not_compiled")
@pytest.mark.parametrize(("window", "scale", "value_size"), [(None, None, HEAD_SIZE), (40, 0.3, 10)])
@pytest.mark.parametrize("sinks", [False, True])
def test_flex_gradients_are_those_of_the_formula(
    window: int | None, scale: float | None, value_size: int, sinks: bool
) -> None:
    """Gradients of sinks are exact, which takes those of the kernel's logarithms of sums."""
    micro = answers_to([7] * 60, [[number] * 30 for number in range(4)])
    inputs = [each.requires_grad_() for each in random_qkv(len(micro.tokens))]
    query, key, value = inputs
    form = AttentionForm(window, scale, torch.linspace(-1, 2, HEADS, requires_grad=True) if sinks else None)
    inputs += [] if form.sinks is None else [form.sinks]
    expected = by_definition(query, key, value[..., :value_size], seen_in_trees(micro), form)
    of_result = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.autograd.grad(expected, inputs, of_result.double())
    attended = tree_layout(micro, CPU, flex.flex_attention).attend(1, query, key, value[..., :value_size], form)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(attended, inputs, of_result), theirs)


@pytest.mark.parametrize("part", [None, torch.arange(150, 500)])
@pytest.mark.parametrize("window", [1, 128, 200, 10**6])
def test_a_window_skips_blocks_that_nothing_in_it_sees(window: int, part: Tensor | None) -> None:
    """No block that torch finds token by token is missing. A sequence has just these; in a tree a block counts
    whose shallow queries and deep keys are of different branches."""
    for packed, exact in (
        (whole_sequences([700]), True),
        (answers_to([7] * 250, [[number] * 200 for number in range(3)]), False),
    ):
        mask = tree_layout(packed, CPU, part=part).mask_within(window)
        expected = flex.create_block_mask(mask.mask_mod, None, None, *mask.seq_lengths, device="cpu")
        found, needed = (each.to_dense() for each in (mask, expected))
        assert (found >= needed).all()
        assert not exact or torch.equal(found, needed)
        wholly, may_be = (whole_blocks(each) for each in (mask, expected))
        assert (wholly <= may_be).all()
        assert not exact or torch.equal(wholly, may_be)


def whole_blocks(mask: flex.BlockMask) -> Tensor:
    counts, places = mask.full_kv_num_blocks, mask.full_kv_indices
    assert counts is not None and places is not None
    found = torch.zeros(mask.to_dense().shape, dtype=torch.bool)
    for row, count in enumerate(counts[0, 0].tolist()):
        found[0, 0, row, places[0, 0, row, :count].long()] = True
    return found


# Which kernel is chosen


def tree_of(prompt: int, answer: int, branches: int) -> np.ndarray:
    ends = np.full(prompt + branches * answer, prompt + branches * answer, dtype=np.int32)
    for first in range(prompt, len(ends), answer):
        ends[first : first + answer] = first + answer
    return ends


@pytest.mark.parametrize(
    ("prompt", "answer", "branches", "faster"),
    [
        (2048, 200, 16, True),
        (8192, 100, 16, True),
        (1024, 500, 16, True),
        (8, 3, 64, True),  # many in a block of 128
        (512, 4096, 4, False),
        (100, 8000, 2, False),
        (12288, 0, 1, False),  # nothing is shared
    ],
)
def test_trees_attend_in_place_if_enough_is_shared(prompt: int, answer: int, branches: int, faster: bool) -> None:
    assert tree_is_faster(tree_of(prompt, answer, branches) if answer else np.full(prompt, prompt, np.int32)) == faster


def test_a_small_tree_beside_much_unshared_is_not_gathered() -> None:
    """Either all that is packed together is gathered, or nothing."""
    alone, tree = np.full(4096, 4096, np.int32), tree_of(256, 64, 2)
    assert not tree_is_faster(np.concatenate((alone, 4096 + tree)))
    assert tree_is_faster(np.concatenate((tree_of(2048, 200, 16), 5248 + tree)))


def test_sinks_need_logarithms_of_sums_that_torch_returns_since_2_9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.8.0a0+5228986c39.nv25.6")
    attention = CudaAttention(None)
    attention.layout(whole_sequences([20]), CPU, torch.bfloat16)
    with pytest.raises(UnsupportedPlatform, match=r"attention with sinks needs torch 2\.9 or later"):
        attention.layout(whole_sequences([20]), CPU, torch.bfloat16, sinks=True)


def test_the_kernel_follows_from_type_and_sharing() -> None:
    attention = CudaAttention(VarlenKernel("one", causal_in_sequences))
    shared = PackedSequences(torch.tensor([0, 5248], dtype=torch.int32), torch.from_numpy(tree_of(2048, 200, 16)))
    alone = whole_sequences([20, 30])
    layouts = {
        (packed is shared, dtype): type(attention.layout(packed, CPU, dtype))
        for packed in (shared, alone)
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert layouts == {
        (True, torch.bfloat16): TreeLayout,
        (False, torch.bfloat16): VarlenLayout,
        (True, torch.float32): TreeLayout,
        (False, torch.float32): TreeLayout,
    }
    assert attention.description.startswith("one; pages by ")
    assert type(attention.layout(alone, CPU, torch.bfloat16, sinks=True)) is TreeLayout
    part = torch.arange(2624)
    assert type(attention.layout(alone, CPU, torch.bfloat16, torch.arange(20))) is TreeLayout
    assert type(attention.layout(shared, CPU, torch.bfloat16, part)) is TreeLayout
