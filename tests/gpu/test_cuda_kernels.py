"""Kernels of a GPU agree with a formula in float64, and Transformer Engine's linears with megatron-core's."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_formula import by_definition, seen_in_trees
from gpu_helpers import NEEDS_CUDA, with_helpers

from megatron_rl.model.platform import flash_kernels
from megatron_rl.model.platform.attention import PLAIN, AttentionForm, Layout, PackedSequences, whole_sequences
from megatron_rl.model.platform.cuda_attention import varlen_layout
from megatron_rl.model.platform.gpu_calls import TRANSFORMER_ENGINE, check_package
from megatron_rl.model.platform.tree_attention import tree_layout

pytestmark = NEEDS_CUDA

GPU = torch.device("cuda", 0)
HEADS, KV_HEADS, HEAD_SIZE = 8, 2, 128


def tree(prompt: int, answer: int, branches: int) -> PackedSequences:
    tokens = prompt + branches * answer
    ends = torch.full((tokens,), tokens, dtype=torch.int32)
    for first in range(prompt, tokens, answer):
        ends[first : first + answer] = first + answer
    return PackedSequences(torch.tensor([0, tokens], dtype=torch.int32), ends)


PACKED = {
    "sequences": whole_sequences([300, 1, 128, 77]),
    "a tree": tree(200, 70, 5),
    "a block": tree(10, 5, 6),
    "a large tree": tree(1000, 150, 8),
}


def compare(
    layout: Layout, packed: PackedSequences, dtype: torch.dtype, tolerance: float, form: AttentionForm = PLAIN
) -> None:
    """Errors of results and gradients, relative to the largest value."""
    generator = torch.Generator(GPU).manual_seed(0)
    qkv = [
        torch.randn(len(packed.subtree_ends), heads, HEAD_SIZE, generator=generator, device=GPU, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    for each in qkv:
        each.requires_grad_()
    attended = layout.attend(1, *qkv, form)
    expected = by_definition(*qkv, seen_in_trees(packed).to(GPU), form)
    qkv += [] if form.sinks is None else [form.sinks]
    of_result = torch.randn(expected.shape, generator=generator, device=GPU, dtype=dtype)
    found = [attended, *torch.autograd.grad(attended, qkv, of_result)]
    exact = [expected, *torch.autograd.grad(expected, qkv, of_result.double())]
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other.double()).abs().max() < tolerance * other.abs().max()


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("find", ["_transformer_engine", "_flash_attn", "_torch"])
def test_a_flash_kernel_agrees_with_the_formula(find: str, packed: PackedSequences) -> None:
    try:
        kernel = getattr(flash_kernels, find)()
    except (ImportError, OSError) as error:
        pytest.skip(f"{error}: flash-attn 2.7.4, Transformer Engine 2.4 or torch 2.12 has such a kernel")
    if kernel is None:
        pytest.skip(f"torch {torch.__version__} has no grouped queries here: 2.12 has")
    for form in (PLAIN, AttentionForm(64, 0.1)):
        compare(varlen_layout(packed, GPU, kernel.attend), packed, torch.bfloat16, 2e-2, form)


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_flex_attention_agrees_with_the_formula(dtype: torch.dtype, tolerance: float, packed: PackedSequences) -> None:
    torch.set_float32_matmul_precision("highest")  # as the platform does
    sinks = torch.linspace(-2, 4, HEADS, device=GPU, dtype=dtype, requires_grad=True)
    for form in (PLAIN, AttentionForm(64, 0.1), AttentionForm(None, None, sinks), AttentionForm(200, None, sinks)):
        compare(tree_layout(packed, GPU), packed, dtype, tolerance, form)


def test_flex_attention_stores_no_scores() -> None:
    """Scores of 16,384 tokens and eight heads in fp32 would take 8 GiB."""
    packed = whole_sequences([16384])
    layout = tree_layout(packed, GPU)
    qkv = [torch.randn(16384, heads, HEAD_SIZE, device=GPU, requires_grad=True) for heads in (HEADS, 2, 2)]
    torch.cuda.reset_peak_memory_stats()
    layout.attend(1, *qkv).sum().backward()
    assert torch.cuda.max_memory_allocated() < 2**30


TWINS = """
import transformer_engine.pytorch
import megatron_rl.run.attempt
import torch, torch.distributed as dist
from megatron.core import parallel_state
from core_helpers import VOCAB, tiny_model
from megatron_rl.model.policy import build_policy
from megatron_rl.model.platform.attention import whole_sequences
from megatron_rl.model.platform.implementation import Implementation
from megatron_rl.model.platform.select import select
from megatron_rl.recipe.job import JobConfig

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model = tiny_model(hidden_size=128, ffn_hidden_size=256, head_dim=32, dtype="bf16")
policies = []
for name in ("local", "transformer_engine"):
    platform = select(JobConfig(gpus_per_node=1, device="cuda"), 0, Implementation(name, "a test"))
    platform.seed(1)
    policies.append(build_policy(model, VOCAB, platform))
local, fused = policies
fused.load_state_dict(local.state_dict())
assert all(torch.equal(a, b) for a, b in zip(fused.state_dict().values(), local.state_dict().values()) if a is not None)
assert [*fused.sharded_state_dict()] == [*local.sharded_state_dict()]
tokens = torch.arange(40, device="cuda") % VOCAB
found = []
for policy in policies:
    logits = policy(tokens, torch.arange(40, device="cuda"), policy.layout(whole_sequences([40])))
    logits.float().log_softmax(-1)[:, 3].sum().backward()
    found.append([logits, *(dict(policy.named_parameters())[name].grad for name, _ in local.named_parameters())])
for one, other in zip(*found):
    assert (one - other).abs().max() < 5e-2 * one.abs().max()
print("the same")
"""


def test_layers_of_transformer_engine_agree_with_local_ones() -> None:
    fit = check_package(TRANSFORMER_ENGINE)
    if not fit.fits:
        pytest.skip(str(fit))
    done = subprocess.run(
        [sys.executable, "-c", TWINS], env=with_helpers(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.strip().endswith("the same"), done.stderr
