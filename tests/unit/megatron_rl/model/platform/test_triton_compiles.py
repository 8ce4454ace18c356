"""Triton's kernels compile for an H100. Its wheels contain the compiler for NVIDIA's GPUs, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = r"""
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import torch
from megatron_rl.model.platform import triton_attention as attention, triton_kernels as kernels

B, F, I = "*bf16", "*fp32", "*i32"
NORM = {"hidden": B, "other": B, "weight": B, "total": B, "normed": B, "size": "i32", "eps": "fp32"}
ROTATION = {name: B for name in ("heads", "cosines", "sines", "query_weight", "key_weight", "query", "keys", "values")}
ROTATION |= {"slots": "*i64", "queries": "i32", "kv_heads": "i32", "size": "i32", "eps": "fp32"}
ATTENTION = {name: B for name in ("query", "keys", "values", "sinks", "out")}
ATTENTION |= {"parts": F, "weights": F, "scale": "fp32"}
ATTENTION |= {name: I for name in ("table", "lengths", "query_edges", "key_edges")}
ATTENTION |= {name: "i32" for name in ("table_width", "kv_heads", "split_tokens")}
PLAIN, GPT_OSS = {"WINDOW": 0, "SINKS": False}, {"WINDOW": 128, "SINKS": True}

def tile(heads, size, rows):
    return attention._tile(torch.empty(1, 256, 1, size, dtype=torch.bfloat16), heads, rows)

for kernel, parameters, constants, options in (
    (kernels._add_and_norm, NORM, {"ADDS": True, "BLOCK": 8192}, {}),
    (kernels._swiglu, {"gate_and_value": B, "out": B, "size": "i32"}, {"BLOCK": kernels.ACTIVATED}, {}),
    (kernels._rotate, ROTATION, {"NORMS": True, "SLOTS": True, "BLOCK": 128}, {}),
    (attention._attend, ATTENTION, {"SINGLE": True, "SPLITS": 16} | PLAIN | tile(5, 128, attention.SMALLEST_SIDE),
     {"num_stages": attention.SINGLE_STAGES}),
    (attention._attend, ATTENTION, {"SINGLE": False, "SPLITS": 1} | PLAIN | tile(5, 128, attention.CHUNK_ROWS), {}),
    (attention._attend, ATTENTION, {"SINGLE": True, "SPLITS": 16} | GPT_OSS | tile(8, 64, attention.SMALLEST_SIDE),
     {"num_stages": attention.SINGLE_STAGES}),
    (attention._attend, ATTENTION, {"SINGLE": False, "SPLITS": 1} | GPT_OSS | tile(8, 64, attention.CHUNK_ROWS), {}),
    (attention._join, {"parts": F, "weights": F, "out": B},
     {"SPLITS": 13, "SIZE": 128, "PARTS": 16, "COLUMNS": 128}, {}),
):
    kinds = {name: parameters.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(kinds.values()) if kind[0] == "*"}
    source = ASTSource(kernel, kinds, constants, aligned)
    compiled = compile(source, GPUTarget("cuda", 90, 32), options)
    rounded = {*re.findall(r"cvt[.]([a-z]*)[.]bf16x?2?.f32", compiled.asm["ptx"])}
    print(kernel.__name__, bool(compiled.asm["cubin"]), compiled.metadata.shared <= 227 * 1024, *rounded)
"""


@pytest.mark.slow
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Compiled kernels round to the nearest number of bf16, while the interpreter cuts off, and have as much shared
    memory as they need."""
    pytest.importorskip("triton.backends.nvidia")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    names = ["_add_and_norm", "_swiglu", "_rotate", *["_attend"] * 4, "_join"]
    assert done.stdout.splitlines() == [f"{name} True True rn" for name in names], done.stderr
