"""A device that is not there: torch's fake tensors compute shapes, types and devices, and hold no number.

A tensor of the CPU beside one of the phantom raises, and so does all that would make the host look at a number (item,
tolist, bool, nonzero), unless it is told to see ones.

The phantom may call itself CUDA as long as nobody wants gradients: autograd asks for CUDA's own streams then.
ACCELERATOR is a device that it asks for nothing.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Self
from unittest import mock

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import transformer_block
from torch import Tensor, UntypedStorage
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Module, Parameter
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl.platform.api import AnyModule
from megatron_rl.platform.cpu import CpuPlatform, patched_for
from megatron_rl.platform.cuda import CudaPlatform
from megatron_rl.platform.cuda_attention import CudaAttention
from megatron_rl.platform.implementation import UNASKED
from megatron_rl.platform.megatron_patches import patch_multi_tensor
from megatron_rl.platform.paged_kernels import PagedKernel
from megatron_rl.platform.varlen_attention import VarlenKernel

ACCELERATOR = torch.device("lazy", 0)
"""An accelerator that this build of torch knows by name alone: gradients are computed as on a CPU."""

_TYPES: Any = DeviceType  # an enumeration of C++'s, of which torch's stubs know the half
_KINDS = {"cuda": int(_TYPES.CUDA), "lazy": int(_TYPES.Lazy)}
_META = int(_TYPES.Meta)
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.to)
"""To another device: the second one arrives whole in inference mode alone."""
_resize = UntypedStorage.resize_


class PhantomDevice(TorchDispatchMode):
    """Within it tensors on `device` are fake, and those of the CPU are real.

    torch's C++ side asks a device for its guard even to slice a tensor: that of the meta device, which does nothing,
    stands in for one that is not there.
    """

    def __init__(self, device: torch.device = ACCELERATOR, *, reads_ones: bool = False) -> None:
        """
        reads_ones: the host sees ones where it looks at the device's numbers, instead of an error.
        """
        super().__init__()
        self.device = device
        self._reads_ones = reads_ones
        self.waits = 0
        """Copies between the devices that the host waits for: all that are not asynchronous, and those from the GPU to
        memory that is not pinned."""
        self.memory = Memory()
        self._pinned: dict[int, Tensor] = {}  # by address
        self._fake = FakeTensorMode()
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        if not hasattr(torch, self.device.type):  # checkpointing asks for it
            torch._register_device_module(self.device.type, ModuleType(f"torch.{self.device.type}"))
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        size = max(_META, *_KINDS.values()) + 1
        self._guards = (ctypes.c_void_p * size).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        self._guard = self._guards[_KINDS[self.device.type]]
        self._guards[_KINDS[self.device.type]] = self._guard or self._guards[_META]
        for patch in (
            patched_for(self.device),
            # As it was, at the end: `patch_multi_tensor` replaces it.
            mock.patch.object(clip_grads, "l2_norm_impl", clip_grads.l2_norm_impl),
            mock.patch.object(clip_grads, "multi_tensor_scale_impl", clip_grads.multi_tensor_scale_impl),
            # megatron-core sets `data` of a tensor that is no view, which a fake one does not survive.
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
        out = func(*args, **kwargs)
        if func.overloadpacket in _COPIES and out is not args[0]:
            self._count_wait(args[0], out, _non_blocking(func, args, kwargs))
            if self._reads_ones and out.device.type == "cpu":
                with unset_fake_temporarily():
                    return torch.ones(out.shape, dtype=out.dtype)
        elif func is torch.ops.aten.copy_.default:
            self._count_wait(args[1], given[0], _non_blocking(func, args, kwargs))
        for made in tree_leaves(out):
            if isinstance(made, FakeTensor) and made.device.type == self.device.type:
                self.memory.hold(made)
        return out

    def empty(self, like: Tensor, device: torch.device | None = None) -> Tensor:
        """A fake tensor of this shape and type."""
        made = FakeTensor(self._fake, torch.empty(like.shape, dtype=like.dtype, device="meta"), device or self.device)
        self.memory.hold(made)
        return made

    def move(self, module: Module, *, requires_grad: bool) -> None:
        """Replace the weights of a module, which may be on the meta device, by fake ones, and what else it has there by
        ones of the CPU."""
        for part in module.modules():
            for name, weight in list(part.named_parameters(recurse=False)):
                fake = Parameter(self.empty(weight), requires_grad=requires_grad)
                fake.__dict__.update(weight.__dict__)  # what megatron-core has noted about it
                part.register_parameter(name, fake)
            for name, value in list(vars(part).items()):
                if isinstance(value, Tensor) and value.is_meta:
                    setattr(part, name, torch.ones(value.shape, dtype=value.dtype))

    def host_memory(self, size: int) -> Tensor:
        """[size] bytes of the CPU that count as pinned."""
        made = torch.empty(size, dtype=torch.uint8)
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _count_wait(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        waited_for = target.device.type == "cpu" and target.untyped_storage().data_ptr() not in self._pinned
        self.waits += source.device != target.device and (waited_for or not non_blocking)


def _non_blocking(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy was asked not to be waited for."""
    place = [argument.name for argument in func._schema.arguments].index("non_blocking")
    asked: bool = args[place] if len(args) > place else kwargs.get("non_blocking", False)
    return asked


def _attend_in_trees(query: Tensor, key: Tensor, value: Tensor, _mask: BlockMask) -> Tensor:
    """As FlexAttention, by a flash kernel that is not there either: the same shapes, and the same memory."""
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return attended


def _attend_in_sequences(query: Tensor, key: Tensor, value: Tensor, _cu_seqlens: Tensor, _longest: int) -> Tensor:
    """As a kernel of variable lengths, of which all need the same memory."""
    query, key, value = (each.transpose(0, 1)[None] for each in (query, key, value))
    attended: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return attended[0].transpose(0, 1)


def _attend_in_pages(
    query: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, _longest: int
) -> Tensor:
    """As a kernel that reads pages: their places are of its types, and all it makes is a result."""
    assert table.dtype is lengths.dtype is torch.int32
    assert keys.shape == values.shape
    assert keys.shape[-1] == query.shape[-1]
    return query + 0 * (keys[0, 0, 0, 0] + table[:, :1, None] + lengths[:, None, None]).to(query.dtype)


@dataclass(slots=True)
class Peak:
    """The most that was held at once while somebody watched."""

    bytes: int = 0
    held_by: Counter[str] = field(default_factory=Counter)
    """Bytes by what they are for."""
    age: int = 0
    """How many tensors had been held by then."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The storage of a tensor."""

    holder: str
    bytes: int
    age: int
    """How many there had been before it."""


class Memory:
    """Bytes of the tensors of one device, by what they are for."""

    def __init__(self) -> None:
        self._live: dict[int, _Held] = {}  # by address of the storage
        self._now: Counter[str] = Counter()
        self._total = 0
        self._age = 0
        self._holder = "activations"
        self._watching: list[Peak] = []

    @contextmanager
    def held_by(self, holder: str) -> Iterator[None]:
        """What is made meanwhile is for this."""
        outer, self._holder = self._holder, holder
        try:
            yield
        finally:
            self._holder = outer

    def assign(self, holder: str, tensors: Iterable[Tensor]) -> None:
        """Tensors that exist are for this, and were so at the peak of a `watched` block that has not ended."""
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
        """The peak of a `with` block, but for the blocks within it that are watched themselves."""
        peak = Peak()
        self._watching.append(peak)
        self._note()
        try:
            yield peak
        finally:
            self._watching.pop()

    def hold(self, tensor: Tensor) -> None:
        """A tensor is there, until its storage is freed."""
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
        """What `resize_` of a storage is replaced by."""

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
    """Implements `GraphRecorder`: what was recorded is computed anew, with the same shapes, and the same memory."""

    def warm_up(self, function: Callable[[], None]) -> None:
        function()

    def record(self, function: Callable[[], None]) -> Callable[[], None]:
        return function

    def release(self) -> None:
        pass


class PhantomPlatform(CudaPlatform):
    """The CUDA platform without a GPU: its layouts and its looks at results, on a device of another name."""

    transformer_overrides = CpuPlatform.transformer_overrides

    def __init__(self, phantom: PhantomDevice) -> None:
        """phantom: that has been entered."""
        self.device = phantom.device
        self.attention = CudaAttention(
            VarlenKernel("phantom", _attend_in_sequences), _attend_in_trees, PagedKernel("phantom", _attend_in_pages)
        )
        self.made_of = UNASKED
        self._phantom = phantom

    def build(self, make: Callable[[], AnyModule], dtype: torch.dtype) -> AnyModule:
        """Made on the meta device, where nothing is drawn, and then given to the phantom."""
        patch_multi_tensor()
        with torch.device("meta"):
            module = make().to(dtype=dtype)
        with self._phantom.memory.held_by("weights"):
            self._phantom.move(module, requires_grad=True)
        return module

    def graph_recorder(self, dtype: torch.dtype, page_tokens: int) -> PhantomGraphs | None:
        return PhantomGraphs() if self.attention.reads_pages(dtype, page_tokens) else None

    def host_memory(self, size: int) -> Tensor:
        return self._phantom.host_memory(size)

    def synchronize(self) -> None:
        pass

    def device_use(self) -> None:
        return None

    def seed(self, seed: int) -> None:
        platform: Any = self
        CpuPlatform.seed(platform, seed)
