"""Kernels of `LayerKernels` in Triton. Imported only where Triton is installed, which CUDA builds of torch require.

A program of Triton runs one row, or one head of it. Numbers are read in the tensors' dtype, computed in fp32, and
rounded where the operators of the training forward round.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_rl.model.platform.layer_kernels import Norms, Slots

ACTIVATED = 1024


@triton.jit
def _add_and_norm(hidden, other, weight, total, normed, size, eps, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    at = row * size + column
    x = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        x += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        x = x.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + at, x.to(total.dtype.element_ty), mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    scaled = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, scaled.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu(gate_and_value, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_and_value + row * 2 * size + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate_and_value + row * 2 * size + size + column, mask=inside, other=0.0).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (activated * value).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    heads, cosines, sines, query_weight, key_weight, query, keys, values, slots, queries, kv_heads, size, eps,
    NORMS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, within = head // (queries + 2), head % (queries + 2)
    column = tl.arange(0, BLOCK)
    inside = column < size
    turned = (column + size // 2) % size
    source = heads + (row * kv_heads * (queries + 2) + head) * size
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    kind = query.dtype.element_ty
    target = row
    if SLOTS:
        target = tl.load(slots + row)
    place = (target * kv_heads + group) * size + column
    if within == queries + 1:
        tl.store(values + place, x.to(kind), mask=inside)
    else:
        y = tl.load(source + turned, mask=inside, other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
            weight = query_weight
            if within == queries:
                weight = key_weight
            x = x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            y = y * scale * tl.load(weight + turned, mask=inside, other=0.0).to(tl.float32)
            x, y = x.to(kind).to(tl.float32), y.to(kind).to(tl.float32)
        cosine = tl.load(cosines + row * size + column, mask=inside, other=0.0).to(tl.float32)
        sine = tl.load(sines + row * size + column, mask=inside, other=0.0).to(tl.float32)
        rotated = ((x * cosine).to(kind).to(tl.float32) + y * sine).to(kind)
        if within == queries:
            tl.store(keys + place, rotated, mask=inside)
        else:
            tl.store(query + ((row * kv_heads + group) * queries + within) * size + column, rotated, mask=inside)


class TritonKernels:
    name = f"Triton {triton.__version__}"

    def norm(self, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = torch.empty_like(hidden)
        self._norm(hidden, hidden, weight, hidden, normed, eps, adds=False)
        return normed

    def add_and_norm(self, hidden: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(hidden), torch.empty_like(hidden)
        self._norm(hidden, other, weight, total, normed, eps, adds=True)
        return total, normed

    def _norm(
        self, hidden: Tensor, other: Tensor, weight: Tensor, total: Tensor, normed: Tensor, eps: float, *, adds: bool
    ) -> None:
        assert hidden.is_contiguous() and other.is_contiguous()
        rows, size = hidden.shape
        block = triton.next_power_of_2(size)
        _add_and_norm[(rows,)](
            hidden, other, weight, total, normed, size, eps, ADDS=adds, BLOCK=block, num_warps=_warps(block)
        )

    def swiglu(self, gate_and_value: Tensor) -> Tensor:
        assert gate_and_value.is_contiguous()
        rows, size = gate_and_value.shape[0], gate_and_value.shape[1] // 2
        out = gate_and_value.new_empty(rows, size)
        _swiglu[(rows, triton.cdiv(size, ACTIVATED))](gate_and_value, out, size, BLOCK=ACTIVATED)
        return out

    def rotate(
        self, heads: Tensor, cosines: Tensor, sines: Tensor, kv_heads: int, norms: Norms | None, slots: Slots | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert heads.is_contiguous() and cosines.is_contiguous() and sines.is_contiguous()
        tokens, size = len(heads), cosines.shape[-1]
        all_heads = heads.shape[1] // size
        query = heads.new_empty(tokens, all_heads - 2 * kv_heads, size)
        key, value = heads.new_empty(2, 0 if slots else tokens, kv_heads, size)
        keys, values = (slots.keys, slots.values) if slots else (key, value)
        assert keys.dtype == heads.dtype and keys.is_contiguous() and values.is_contiguous()
        _rotate[(tokens, all_heads)](
            heads,
            cosines,
            sines,
            norms.query if norms else heads,
            norms.key if norms else heads,
            query,
            keys,
            values,
            slots.index if slots else heads,
            query.shape[1] // kv_heads,
            kv_heads,
            size,
            norms.eps if norms else 0.0,
            NORMS=norms is not None,
            SLOTS=slots is not None,
            BLOCK=triton.next_power_of_2(size),
            num_warps=1,
        )
        return query, key, value


def _warps(block: int) -> int:
    """Warps of a program that holds a block of this many elements in registers: 16 elements a thread."""
    return min(16, max(1, block // 512))
