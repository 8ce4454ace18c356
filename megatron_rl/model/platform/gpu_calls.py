"""Calls of packages that only GPUs use, and a check that the installed releases accept them:

    python3 -m megatron_rl.model.platform.gpu_calls [DISTRIBUTION]...

prints one line per package, and ends with 1 if a call does not fit or a named package is missing. It needs no GPU, and
only the standard library until it imports the packages, so that `mrl doctor --deep` can send it into any image.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuCall:
    """A function that is called, a class that is instantiated, or one that is only derived from or passed on."""

    package: str
    module: str
    name: str  # its name in the module; a method after its class, such as DotProductAttention.forward.
    positional: int = 0  # positional arguments, without `self`
    keywords: tuple[str, ...] = ()
    since: str = ""  # first release in which the project calls it

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, so that Python cannot read its parameters."""
        return self.module.startswith("torch._C") or self.of_nccl

    @property
    def of_nccl(self) -> bool:
        """Whether only builds of torch with NCCL have it."""
        return self.name.startswith(NCCL)


NCCL = "ProcessGroupNCCL"
FLASH_ATTN, TRANSFORMER_ENGINE = "flash-attn", "transformer-engine"

GPU_CALLS = (
    GpuCall(FLASH_ATTN, "flash_attn", "flash_attn_varlen_func", 7, ("causal", "softmax_scale", "window_size")),
    GpuCall(
        FLASH_ATTN,
        "flash_attn",
        "flash_attn_varlen_func",
        7,
        ("block_table", "causal", "return_attn_probs", "softmax_scale", "window_size"),
    ),
    GpuCall(
        FLASH_ATTN,
        "flash_attn",
        "flash_attn_with_kvcache",
        3,
        (
            "block_table",
            "cache_seqlens",
            "causal",
            "num_splits",
            "return_softmax_lse",
            "softmax_scale",
            "window_size",
        ),
    ),
    GpuCall(
        TRANSFORMER_ENGINE,
        "transformer_engine.pytorch",
        "DotProductAttention",
        0,
        (
            "attention_dropout",
            "attn_mask_type",
            "kv_channels",
            "num_attention_heads",
            "num_gqa_groups",
            "qkv_format",
            "softmax_scale",
            "window_size",
        ),
    ),
    GpuCall(
        TRANSFORMER_ENGINE,
        "transformer_engine.pytorch",
        "DotProductAttention.forward",
        3,
        ("cu_seqlens_kv", "cu_seqlens_q", "max_seqlen_kv", "max_seqlen_q", "pad_between_seqs"),
    ),
    GpuCall("megatron-core", "megatron.core.extensions.transformer_engine", "TELayerNormColumnParallelLinear"),
    GpuCall("megatron-core", "megatron.core.extensions.transformer_engine", "TERowParallelLinear"),
    GpuCall("torch", "torch.cuda", "CUDAGraph"),
    GpuCall("torch", "torch.cuda", "graph", 3, ("capture_error_mode",)),
    GpuCall("torch", "torch.cuda", "graph_pool_handle"),
    GpuCall("torch", "torch.cuda", "power_draw", 1),
    GpuCall(
        "torch",
        "torch.nn.attention.flex_attention",
        "BlockMask.from_kv_blocks",
        4,
        ("BLOCK_SIZE", "mask_mod", "seq_lengths"),
    ),
    GpuCall(
        "torch",
        "torch.nn.attention.flex_attention",
        "flex_attention",
        3,
        ("block_mask", "enable_gqa", "kernel_options", "scale"),
    ),
    GpuCall("torch", "torch.nn.attention.flex_attention", "flex_attention", 3, ("return_aux",), since="2.9"),
    GpuCall("torch", "torch.nn.attention.flex_attention", "AuxRequest", 0, ("lse",), since="2.9"),
    GpuCall(
        "torch", "torch.nn.attention.varlen", "varlen_attn", 7, ("enable_gqa", "scale", "window_size"), since="2.12"
    ),
    GpuCall("torch", "torch.nn.functional", "grouped_mm", 2, ("offs",), since="2.10"),
    GpuCall("torch", "torch.distributed", NCCL, 4, since="2.11"),
    GpuCall("torch", "torch.distributed", f"{NCCL}.Options", since="2.11"),
    GpuCall("torch", "torch.distributed", f"{NCCL}.Options._timeout", since="2.11"),
    GpuCall("torch", "torch.distributed", f"{NCCL}.Options.config", since="2.11"),
    GpuCall("torch", "torch.distributed", f"{NCCL}.NCCLConfig.blocking", since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend.send", 3, since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend.recv", 3, since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend.allgather", 2, since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend._start_coalescing", since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend._end_coalescing", since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend.eager_connect_single_device", 1, since="2.11"),
    GpuCall("torch", "torch._C._distributed_c10d", "Backend.abort", since="2.11"),
)

RELEASES = {FLASH_ATTN: "2.7.4", "megatron-core": "0.16.1", "torch": "2.7", TRANSFORMER_ENGINE: "2.4"}
"""Oldest release of each package that accepts all calls."""
DRIVER = "libcuda.so.1"


@dataclass(frozen=True, slots=True)
class Fit:
    package: str
    version: str | None  # its release; None: not installed
    problems: tuple[str, ...] = ()  # calls that it does not accept, or why it cannot be imported
    unchecked: bool = False  # whether it cannot be imported because this machine has no driver for GPUs

    @property
    def fits(self) -> bool:
        return self.version is not None and not self.problems

    def __str__(self) -> str:
        newer = f"install {self.package} {RELEASES[self.package]} or later"
        if self.version is None:
            return f"{self.package} is not installed: {newer}"
        if self.problems:
            return f"{self.package} {self.version}: {'; '.join(self.problems)}: {newer}"
        if self.unchecked:
            return f"{self.package} {self.version} is not checked: this machine has no driver for GPUs"
        return f"{self.package} {self.version} accepts all calls"


def check_packages(calls: Iterable[GpuCall] = GPU_CALLS) -> list[Fit]:
    by_package: dict[str, list[GpuCall]] = {}
    for call in calls:
        by_package.setdefault(call.package, []).append(call)
    return [_check(package, theirs) for package, theirs in by_package.items()]


def check_package(package: str) -> Fit:
    (fit,) = check_packages(call for call in GPU_CALLS if call.package == package)
    return fit


def _check(package: str, calls: Iterable[GpuCall]) -> Fit:
    version = _version(package)
    if version is None:
        return Fit(package, None)
    used = [call for call in calls if release_of(version) >= release_of(call.since) and _is_built(call)]
    problems = list(dict.fromkeys(problem for call in used if (problem := problem_of(call, _load))))
    of_driver = [problem for problem in problems if DRIVER in problem]
    return Fit(package, version, tuple(one for one in problems if one not in of_driver), bool(of_driver))


def _is_built(call: GpuCall) -> bool:
    """Whether this build has what the call is for: CPU builds of torch have no NCCL, and never make its calls."""
    return not call.of_nccl or bool(importlib.import_module(call.module).is_nccl_available())


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, ...]:
    """Numbers of a release, such as (2, 8, 0) of 2.8.0a0+5228986c39.nv25.6. A pre-release counts as its release."""
    return tuple(int(number) for number in re.split(r"[^\d.]", version)[0].split(".") if number)


def _load(call: GpuCall) -> Any:
    if call.package == "megatron-core":
        with contextlib.suppress(ImportError):  # as a rank imports it; an image need not contain mrl
            importlib.import_module("megatron_rl.model.platform.megatron_core")
    module = importlib.import_module(call.module)
    if vars(module).get("HAVE_TE") is False and _version(TRANSFORMER_ENGINE):
        raise ImportError("it lacks parts of the installed Transformer Engine, which megatron-core imports")
    return functools.reduce(getattr, call.name.split("."), module)


def problem_of(call: GpuCall, load: Callable[[GpuCall], Any]) -> str | None:
    """Say why a call would fail; None if it would not.

    load: returns the function or class that is called.
    """
    try:
        found = load(call)
    except (ImportError, OSError) as error:  # OSError: one of its libraries is missing
        return f"{call.module} cannot be imported ({error})"
    except AttributeError:
        return f"{call.module} has no {call.name}"
    if call.compiled or not (call.positional or call.keywords):
        return None
    signature = inspect.signature(found)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    try:
        signature.replace(parameters=parameters).bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"{call.module}.{call.name}: {error}"
    return None


def offered(backend: str) -> str:
    """Name the transport that a process of this backend has: `gloo`, or `nccl` with its release, because NCCL connects
    only processes with the same one."""
    return f"{backend} {nccl_release()}" if backend == "nccl" else backend


def nccl_release() -> str:
    """Return the release of NCCL that this process uses, as NCCL itself compares it, such as 2.27.3. torch reports the
    one that it was compiled with, and LD_PRELOAD may have brought another. torch must be a build with NCCL.

    It imports what it needs itself, so that `mrl doctor --deep` can send it alone into any image."""
    import ctypes
    import os

    import torch

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is part of torch's own library
        return ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def main(required: Sequence[str]) -> int:
    fits = check_packages()
    for fit in fits:
        print(fit)  # noqa: T201
    return int(any(fit.problems or (fit.version is None and fit.package in required) for fit in fits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
