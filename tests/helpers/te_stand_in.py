"""A stand-in for Transformer Engine. Call `install` before megatron-core is imported.

Its linears have the signatures, parameters, attributes and extra state of version 2.9 (from the sources of
transformer_engine_torch; 2.4 only lacks `save_original_input`), and compute the documented results on any device. All
other classes can be imported, but raise when instantiated.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear, rms_norm

VERSION = "2.9.0"


class _Stateful(Module):
    """Module with the extra state that FP8 needs, which every checkpoint has, with or without FP8."""

    def get_extra_state(self) -> Tensor:
        return torch.ones(1, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        assert state.numel()


products_in_fp8 = gradients_in_place = 0
_in_fp8 = False


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Any = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    global _in_fp8
    before, _in_fp8 = _in_fp8, enabled
    try:
        yield
    finally:
        _in_fp8 = before


class Float8CurrentScaling:
    """Recipe that scales each tensor by its largest value."""

    def __init__(self, fp8_format: Any = None, fp8_dpa: bool = False) -> None:
        assert fp8_format in ("hybrid", "e4m3")


class Format:
    HYBRID, E4M3 = "hybrid", "e4m3"


def _rounded(tensor: Tensor) -> Tensor:
    """Round to E4M3, scaled by the largest value; the gradient ignores the rounding."""
    scale = 448 / tensor.detach().abs().max().float()
    near = ((tensor.detach() * scale).to(torch.float8_e4m3fn).float() / scale).to(tensor.dtype)
    return tensor + (near - tensor.detach())


class _AddedInPlace(torch.autograd.Function):
    """Product that adds its weight's gradient to `main_grad`, and returns NaN as the gradient, which must not be read.
    It returns none if the saved weight is no longer the parameter itself."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Parameter) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.main_grad = weight.main_grad
        return given @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        global gradients_in_place
        gradients_in_place += 1
        given, weight = ctx.saved_tensors
        ctx.main_grad += gradient.flatten(0, -2).T @ given.flatten(0, -2)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return gradient @ weight, None
        weight.grad_added_to_main_grad = True
        return gradient @ weight, torch.full_like(weight, torch.nan)


class _Linear(_Stateful):
    split: int
    """Dimension of the weight that tensor-parallel ranks share out: 0 for column-parallel, 1 for row-parallel."""

    def _begin(
        self, shape: Sequence[int], init_method: Any, bias: bool, dtype: torch.dtype | None, fuse: bool, returned: bool
    ) -> None:
        self.weight = Parameter(torch.empty(*shape, dtype=dtype))
        if init_method is not None:
            init_method(self.weight)
        self.bias = Parameter(torch.zeros(shape[0], dtype=dtype)) if bias else None
        self.use_bias, self.return_bias, self.fuse_wgrad_accumulation = bias, returned, fuse
        weights: list[Any] = [self.weight, *([self.bias] if self.bias is not None and self.split == 0 else [])]
        for weight in weights:
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, self.split, 1

    def _received(self, given: Tensor) -> Any:
        """Input of a column-parallel product: the tokens of all ranks under sequence parallelism."""
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(given, group=self.tp_group)
        return mappings.copy_to_tensor_model_parallel_region(given, group=self.tp_group)

    def _summed(self, out: Tensor) -> Any:
        """Sum of a row-parallel product, or this rank's tokens of it."""
        from megatron.core.tensor_parallel import mappings

        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)

    def _product(self, given: Tensor) -> Any:
        weight = self.weight
        if _in_fp8:
            global products_in_fp8
            products_in_fp8 += 1
            assert given[..., 0].numel() % 16 == 0
            assert all(size % 16 == 0 for size in weight.shape)
            given = _rounded(given)
        if self.fuse_wgrad_accumulation and torch.is_grad_enabled():
            out = _AddedInPlace.apply(given, weight)
        else:
            out = linear(given, weight)
        if self.return_bias:
            return out, self.bias
        return out if self.bias is None else out + self.bias


class LayerNormLinear(_Linear):
    split = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        zero_centered_gamma: bool = False,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert (normalization, parallel_mode) == ("RMSNorm", "column")
        self.eps = eps
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel and tp_size > 1
        weight: Any = Parameter(torch.ones(in_features, dtype=params_dtype))
        weight.sequence_parallel = self.sequence_parallel
        self.layer_norm_weight = weight
        shape = (out_features // tp_size, in_features)
        self._begin(shape, init_method, bias, params_dtype, fuse_wgrad_accumulation, return_bias)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        assert is_first_microbatch is None, "otherwise the gradient of the first replaces the sum"
        normed = rms_norm(inp, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps)
        return self._product(self._received(normed))


class Linear(_Linear):
    split = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[..., Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[..., Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        parameters_split: Any = None,
        device: torch.device | str = "cuda",
        ub_overlap_ag: bool = False,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        ub_name: str | None = None,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        save_original_input: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        assert (parallel_mode, bias) == ("row", False)
        self.save_original_input = save_original_input
        self.tp_group, self.sequence_parallel = tp_group, sequence_parallel and tp_size > 1
        shape = (out_features, in_features // tp_size)
        self._begin(shape, init_method, bias, params_dtype, fuse_wgrad_accumulation, return_bias)

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool | None = False,
        fp8_grad: bool | None = False,
    ) -> Any:
        assert is_first_microbatch is None, "otherwise the gradient of the first replaces the sum"
        out = self._product(inp)
        return (self._summed(out[0]), None) if self.return_bias else self._summed(out)


class SplitAlongDim:
    """Split of queries, keys and values, which megatron-core uses with Transformer Engine."""

    @staticmethod
    def apply(mixed: Tensor, dim: int, sections: Sequence[int]) -> tuple[Tensor, ...]:
        return torch.split(mixed, sections, dim)


def get_cpu_offload_context(*_: Any, **__: Any) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Context without offload, which megatron-core requests in any case."""
    return nullcontext(), lambda tensor: tensor


_NAMED: list[Any] = [LayerNormLinear, Linear, get_cpu_offload_context, fp8_autocast, Float8CurrentScaling, Format]
REAL = {each.__name__: each for each in _NAMED} | {"_SplitAlongDim": SplitAlongDim}


def _needs_cuda(self: Any, *_: Any, **__: Any) -> None:
    raise RuntimeError("Transformer Engine needs CUDA")


def _name(module: ModuleType, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in ("ops", "recipe", "distributed", "common", "pytorch"):
        return importlib.import_module(f"{module.__name__}.{name}")
    if name in REAL:
        return REAL[name]
    base = torch.optim.Optimizer if name.startswith("Fused") else Module
    return type(name, (base,), {"__init__": _needs_cuda})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] == "transformer_engine":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.__version__ = VERSION
        module.__getattr__ = lambda name: _name(module, name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "transformer_engine.pytorch":
            importlib.import_module("transformer_engine.pytorch.optimizers")  # as the real one does


def install() -> None:
    """Make Transformer Engine importable."""
    sys.meta_path.insert(0, _Finder())
