"""A device that does not exist: torch's fake tensors have shapes, dtypes and devices, but no values.

Mixing CPU tensors with the phantom's raises, and so does every operation that would make the host read a value (item,
tolist, bool, nonzero), unless the phantom is set to return ones.

The phantom may pose as CUDA if gradients are not needed: autograd would ask for CUDA streams. ACCELERATOR is a device
without streams.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import transformer_block
from torch import Tensor, UntypedStorage
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Module, Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl.model.platform.attention import widened
from megatron_rl.model.platform.cpu import CpuDevice, CpuKernels, patched_for
from megatron_rl.model.platform.cuda import CudaDevice
from megatron_rl.model.platform.cuda_attention import CudaAttention
from megatron_rl.model.platform.cuda_kernels import CudaKernels
from megatron_rl.model.platform.device import AnyModule
from megatron_rl.model.platform.flash_kernels import PagedKernel, VarlenKernel
from megatron_rl.model.platform.layer_kernels import TorchKernels
from megatron_rl.model.platform.megatron_patches import patch_multi_tensor
from megatron_rl.model.platform.phantom_delta import phantom_delta

ACCELERATOR = torch.device("lazy", 0)
"""An accelerator that this build of torch knows only by name. Gradients are computed as on a CPU."""

_TYPES: Any = DeviceType  # an enumeration of C++ that torch's stubs list only in part
_KINDS = {"cuda": int(_TYPES.CUDA), "lazy": int(_TYPES.Lazy)}
_META = int(_TYPES.Meta)
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to)
"""Copies to another device. The second operator arrives whole only in inference mode."""
_resize = UntypedStorage.resize_


class PhantomDevice(TorchDispatchMode):
    """Mode in which tensors on `device` are fake and those of the CPU real.

    torch's C++ code needs a guard of the device even to slice a tensor. The guard of the meta device, which does
    nothing, replaces a missing one.
    """

    def __init__(self, device: torch.device = ACCELERATOR, *, reads_ones: bool = False) -> None:
        """reads_ones: the host reads ones from the device instead of raising, and finds all values nonzero."""
        super().__init__()
        self.device = device
        self._reads_ones = reads_ones
        self.waits = 0
        """Copies between devices that the host waits for: synchronous ones, and those from the device to memory that is
        not pinned."""
        self.memory = HeldMemory()
        self._pinned: dict[int, Tensor] = {}  # by address
        self._fake = FakeTensorMode()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        if not hasattr(torch, self.device.type):  # required by checkpointing
            torch._register_device_module(self.device.type, ModuleType(f"torch.{self.device.type}"))
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        size = max(_META, *_KINDS.values()) + 1
        self._guards = (ctypes.c_void_p * size).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        self._guard = self._guards[_KINDS[self.device.type]]
        self._guards[_KINDS[self.device.type]] = self._guard or self._guards[_META]
        for patch in (
            patched_for(self.device),
            # Restores them at the end: `patch_multi_tensor` replaces them.
            mock.patch.object(clip_grads, "l2_norm_impl", clip_grads.l2_norm_impl),
            mock.patch.object(clip_grads, "multi_tensor_scale_impl", clip_grads.multi_tensor_scale_impl),
            # megatron-core sets `data` of a tensor that is not a view, which fake tensors do not support.
            mock.patch.object(transformer_block, "make_viewless_tensor", lambda inp, **_: inp),
            mock.patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: [self.device.type]),
            mock.patch.object(UntypedStorage, "resize_", self.memory.resize),
        ):
            self._patches.enter_context(patch)
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)
        self._patches.close()
        self._guards[_KINDS[self.device.type]] = self._guard

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        fakes = sum(isinstance(each, FakeTensor) for each in tensors)
        if not fakes and (asked is None or asked.type != self.device.type):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        given = args
        if fakes < len(tensors):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        if self._reads_ones and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        if self._reads_ones and func is torch.ops.aten.nonzero.default:  # where all are ones
            out = args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
        else:
            out = func(*args, **kwargs)
        if func.overloadpacket in _COPIES and out is not args[0]:
            self._count_wait(args[0], out, _non_blocking(func, args, kwargs))
            if self._reads_ones and out.device.type == "cpu":
                with unset_fake_temporarily():
                    return torch.ones(out.shape, dtype=out.dtype)
        elif func is torch.ops.aten.copy_.default:
            self._count_wait(args[1], given[0], _non_blocking(func, args, kwargs))
        for result in tree_leaves(out):
            if isinstance(result, FakeTensor) and result.device.type == self.device.type:
                self.memory.hold(result)
        return out

    def empty(self, like: Tensor, device: torch.device | None = None) -> Tensor:
        fake = FakeTensor(self._fake, torch.empty(like.shape, dtype=like.dtype, device="meta"), device or self.device)
        self.memory.hold(fake)
        return fake

    def move(self, module: Module, *, requires_grad: bool) -> None:
        """Replace the weights of a module, possibly on the meta device, by fake ones, and its other meta tensors by CPU
        tensors of ones."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                fake = Parameter(self.empty(weight), requires_grad=requires_grad)
                fake.__dict__.update(weight.__dict__)  # keeps megatron-core's attributes
                part.register_parameter(name, fake)
            for name, value in list(vars(part).items()):
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(part, name, torch.ones(value.shape, dtype=value.dtype))

    def host_memory(self, size: int) -> Tensor:
        """[size] bytes of CPU memory that count as pinned."""
        memory = torch.empty(size, dtype=torch.uint8)
        self._pinned[memory.untyped_storage().data_ptr()] = memory
        return memory

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _count_wait(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        pinned = not isinstance(target, FakeTensor) and target.untyped_storage().data_ptr() in self._pinned
        waits = target.device.type == "cpu" and not pinned
        self.waits += source.device != target.device and (waits or not non_blocking)


def _non_blocking(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    index = [argument.name for argument in func._schema.arguments].index("non_blocking")
    asked: bool = args[index] if len(args) > index else kwargs.get("non_blocking", False)
    return asked


def _attend_in_trees(query: Tensor, key: Tensor, value: Tensor, *, return_aux: Any = None, **_: Any) -> Any:
    """FlexAttention with the shapes and the memory of a flash kernel."""
    wide = widened(value, key.shape[-1])
    attended, log_sums, *_rest = torch.ops.aten._scaled_dot_product_flash_attention(query, key, wide)
    attended = attended[..., : value.shape[-1]]
    return attended if return_aux is None else (attended, SimpleNamespace(lse=log_sums))


def _attend_in_sequences(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """A kernel for variable lengths. All such kernels need the same memory."""
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return attended[0].transpose(0, 1)


def _attend_in_pages(query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, *_: Any) -> Tensor:
    """A kernel that reads pages: checks dtypes and allocates only its result."""
    assert table.dtype is lengths.dtype is torch.int32
    assert keys.shape == values.shape
    assert keys.shape[-1] == query.shape[-1]
    return query + 0 * (keys[0, 0, 0, 0] + table[:, :1, None] + lengths[:, None, None]).to(query.dtype)


def _attend_in_chunks(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, of_queries: Tensor, of_keys: Tensor, *_: Any
) -> Tensor:
    assert table.dtype is of_queries.dtype is of_keys.dtype is torch.int32
    assert len(of_queries) == len(of_keys) == len(table) + 1
    assert keys.shape == values.shape
    assert keys.shape[-1] == query.shape[-1]
    return query + 0 * (keys[0, 0, 0, 0] + table[0, 0] + of_queries[0] + of_keys[0]).to(query.dtype)


@dataclass(slots=True)
class Peak:
    """Largest number of bytes held at once within a `watched` block."""

    bytes: int = 0
    held_by: Counter[str] = field(default_factory=Counter)
    age: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    holder: str
    bytes: int
    age: int  # number of tensors created before it


class HeldMemory:
    def __init__(self) -> None:
        self._live: dict[int, _Held] = {}  # by address of the storage
        self._now: Counter[str] = Counter()
        self._total = 0
        self._age = 0
        self._holder = "activations"
        self._watching: list[Peak] = []

    @contextmanager
    def held_by(self, holder: str) -> Iterator[None]:
        """Assign tensors created in a `with` block to this holder."""
        outer, self._holder = self._holder, holder
        try:
            yield
        finally:
            self._holder = outer

    def assign(self, holder: str, tensors: Iterable[Tensor]) -> None:
        """Assign existing tensors to a holder, also in the peaks of open `watched` blocks."""
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            before = self._live[address]
            self._live[address] = replace(before, holder=holder)
            seen = [peak.held_by for peak in self._watching if before.age < peak.age]
            for held_by in (self._now, *seen):
                held_by[before.holder] -= before.bytes
                held_by[holder] += before.bytes

    @contextmanager
    def watched(self) -> Iterator[Peak]:
        """Yield the peak of a `with` block, not counting nested watched blocks."""
        peak = Peak()
        self._watching.append(peak)
        self._note()
        try:
            yield peak
        finally:
            self._watching.pop()

    def hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        size = storage.nbytes()
        self._live[storage._cdata] = _Held(self._holder, size, self._age)
        weakref.finalize(storage, self._free, storage._cdata)
        self._now[self._holder] += size
        self._total += size
        self._age += 1
        self._note()

    @property
    def resize(self) -> Callable[[UntypedStorage, int], None]:

        def resize(storage: UntypedStorage, size: int) -> None:
            _resize(storage, size)
            if held := self._live.get(storage._cdata):
                self._live[storage._cdata] = replace(held, bytes=size)
                self._now[held.holder] += size - held.bytes
                self._total += size - held.bytes
                self._note()

        return resize

    def _free(self, address: int) -> None:
        held = self._live.pop(address)
        self._now[held.holder] -= held.bytes
        self._total -= held.bytes

    def _note(self) -> None:
        if self._watching and self._total > self._watching[-1].bytes:
            peak = self._watching[-1]
            peak.bytes, peak.held_by, peak.age = self._total, self._now.copy(), self._age


class PhantomGraphs:
    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def release(self) -> None:
        pass


class PhantomKernels(CudaKernels):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.transformer_overrides = CpuKernels.transformer_overrides
        self.attention = CudaAttention(
            VarlenKernel("phantom", _attend_in_sequences),
            _attend_in_trees,
            [PagedKernel("phantom", _attend_in_pages, _attend_in_chunks, fp32=True, page_multiple=1)],
        )
        self.layer_kernels = TorchKernels("a phantom")
        self.delta_kernels = phantom_delta()

    def against_grouped_products(self, dtype: torch.dtype) -> str | None:
        return None if dtype == torch.bfloat16 else "the grouped product needs bf16"

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> PhantomGraphs:
        return PhantomGraphs()


class PhantomCuda(CudaDevice):
    """A CUDA device without a GPU."""

    def __init__(self, phantom: PhantomDevice) -> None:
        self.device = phantom.device
        self.kernels: PhantomKernels = PhantomKernels(phantom.device)
        self._phantom = phantom

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        """Build the module on the meta device, where no weights are drawn, and move it to the phantom."""
        patch_multi_tensor()
        with torch.device("meta"):
            module = make().to(dtype=dtype)
        with self._phantom.memory.held_by("weights"):
            self._phantom.move(module, requires_grad=True)
        return module

    def host_memory(self, size: int) -> Tensor:
        return self._phantom.host_memory(size)

    def synchronize(self) -> None:
        pass

    def device_use(self) -> None:
        return None

    def seed(self, seed: int) -> None:
        device: Any = self
        CpuDevice.seed(device, seed)
