"""Kernels that a decode step launches on a GPU and the bytes that they read and write, counted without one: from the
operators that an engine's own code calls on tensors without values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_rl.generate.engine.model_runner import ModelRunner
from megatron_rl.model.platform.flash_kernels import PagedKernel
from megatron_rl.model.platform.layer_kernels import Norms, Slots, TorchKernels
from megatron_rl.model.platform.phantom import PhantomCuda, PhantomDevice
from megatron_rl.model.policy import build_policy
from megatron_rl.recipe.inference import InferenceConfig
from megatron_rl.recipe.job import TrainingLayout
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.run.rehearse.phantom_world import alone_in

ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@dataclass(frozen=True)
class Step:
    kernels: Counter[str]
    """Number of launches by operator."""
    bytes: int
    """Bytes of all tensors that they read and write, as if nothing stayed in the GPU's caches."""

    @property
    def launches(self) -> int:
        return self.kernels.total()


class Launches(TorchDispatchMode):
    """Counts the operators in a `with` block that launch a kernel: all except views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes = 0
        self._counted = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._counted and _launches(func, (args, kwargs), out):
            name = str(func.overloadpacket)
            self.kernels[name] += 1
            self.bytes += _bytes(out) if name in ("aten.index_select", "aten.index", "aten.embedding") else _bytes(args)
            self.bytes += 0 if func._schema.is_mutable else _bytes(out)
        return out

    @contextmanager
    def kernel(self, name: str, size: int, count: int = 1) -> Iterator[None]:
        """Count what a `with` block does as kernels that read and write `size` bytes."""
        self.kernels[name] += count
        self.bytes += size
        self._counted = False
        try:
            yield
        finally:
            self._counted = True


def _launches(func: Any, given: Any, out: Any) -> bool:
    if func._schema.name.partition("::")[2] in ALLOCATIONS:
        return False
    if func._schema.is_mutable or func.namespace == "c10d":
        return True
    storages = {each.untyped_storage()._cdata for each in tree_leaves(given) if isinstance(each, Tensor)}
    made = [each for each in tree_leaves(out) if isinstance(each, Tensor)]
    return any(each.untyped_storage()._cdata not in storages for each in made)


def _bytes(tensors: Any) -> int:
    return sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, Tensor))


class OneKernelEach(TorchKernels):
    """Triton's kernels, as they count."""

    def __init__(self, launches: Launches) -> None:
        super().__init__("counted")
        self._launches = launches

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        with self._launches.kernel("norm", 2 * hidden.nbytes):
            return super().norm(hidden, weight, eps)

    def add_and_norm(self, hidden: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        with self._launches.kernel("sum, norm", 4 * hidden.nbytes):
            total = hidden + other
            return total, torch.empty_like(total)

    def swiglu(self, gate_and_value: Tensor) -> Tensor:
        with self._launches.kernel("activation", gate_and_value.nbytes * 3 // 2):
            return super().swiglu(gate_and_value)

    def rotate(
        self, heads: Tensor, cosines: Tensor, sines: Tensor, kv_heads: int, norms: Norms | None, slots: Slots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        with self._launches.kernel("rotation, cache", 2 * heads.nbytes):
            return super().rotate(heads, cosines, sines, kv_heads, norms, slots)


def decode_step(
    model: ModelConfig, tp: int, rows: int, mean_length: int, longest: int, *, fused: bool, splits: int | None = None
) -> Step:
    """Count a decode step of one rank that samples at temperature 1.

    Args:
        model: with `vocab_size`.
        mean_length: tokens in the cache per row.
        longest: tokens of a sequence at most.
        fused: whether the engine has its own forward (model/fused.py), or generates with the training layers.
        splits: number of splits of the keys; default: that of the engine.
    """
    assert model.vocab_size is not None
    launches = Launches()
    layout = TrainingLayout(tp=tp)
    with alone_in(tp, 0, layout), PhantomDevice() as device, torch.no_grad():
        platform = PhantomCuda(device)
        platform.kernels.layer_kernels = OneKernelEach(launches) if fused else None
        platform.kernels.attention = replace(
            platform.kernels.attention, pages=[_counted(launches, rows * mean_length, splits)]
        )
        policy = build_policy(model, model.vocab_size, platform).requires_grad_(False).eval()
        pages = 2, platform.kernels.page_tokens
        runner = ModelRunner(policy, model, InferenceConfig(max_batch=rows, cuda_graphs=False), pages, {0}, longest)
        cache, of_rows = runner._make_cache(), slice(0, rows)
        work = runner._rows.work(of_rows)
        runner._decode_step(of_rows, work, cache)  # builds what later steps keep
        launches.kernels.clear()
        launches.bytes = 0
        with (
            launches,
            mock.patch.object(torch.nn.functional, "rms_norm", _one_norm(launches)),
            mock.patch.object(dist, "all_gather", _one_gather(launches)),
        ):
            runner._decode_step(of_rows, work, cache)
    return Step(launches.kernels, launches.bytes)


def _one_norm(launches: Launches) -> Callable[..., Tensor]:
    """torch's RMSNorm, which is one kernel on a GPU and a formula of many operators elsewhere."""

    def rms_norm(hidden: Tensor, *_: Any) -> Tensor:
        with launches.kernel("norm", 2 * hidden.nbytes):
            return torch.empty_like(hidden)

    return rms_norm


def _one_gather(launches: Launches) -> Callable[..., None]:
    def all_gather(parts: list[Tensor], part: Tensor, group: Any) -> None:
        with launches.kernel("all-gather", 2 * len(parts) * part.nbytes):
            pass

    return all_gather


def _counted(launches: Launches, tokens: int, splits: int | None) -> PagedKernel:
    """flash-attn's kernels for a cache with this many tokens: a second one joins splits, whose partial results are
    written and read in fp32."""

    def attend(query: Tensor, keys: Tensor, _values: Tensor, *given: Any) -> Tensor:
        count = splits or given[-2]
        size = 2 * tokens * keys[0, 0].nbytes + 2 * query.nbytes + 4 * query.nbytes * count * (count > 1)
        with launches.kernel("attention", size, 1 + (count > 1)):
            return torch.empty_like(query)

    return PagedKernel("counted", attend, lambda query, *_: query, fp32=False, page_multiple=256)


QWEN_32B = ModelConfig(
    num_layers=64,
    hidden_size=5120,
    ffn_hidden_size=27648,
    num_attention_heads=40,
    num_query_groups=8,
    qkv_bias=True,
    tied_embeddings=False,
    vocab_size=152064,
    max_position_embeddings=12288,
    dtype="bf16",
    init="from-scratch",
)
"""Shape of Qwen2.5-32B."""
