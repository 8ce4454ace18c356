"""A GPU that is not there: torch's fake tensors compute shapes, types and devices on "cuda:0" of a CPU build.

A tensor of the CPU beside one of the GPU raises; so does all that would make the host look at a number: item, tolist,
bool, nonzero. Only without gradients: autograd wants to know more of a device than a phantom has. For them, and for
sizes that no machine of the tests can hold, there are fake tensors on the CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from core_helpers import VOCAB
from megatron.core.transformer import transformer_block
from torch import Tensor
from torch._C._autograd import DeviceType
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_rl.model.config import ModelConfig, Recompute
from megatron_rl.model.policy import Policy, build_policy
from megatron_rl.platform.api import Platform
from megatron_rl.platform.cpu import CpuPlatform
from megatron_rl.platform.cuda import CudaPlatform

GPU = torch.device("cuda", 0)
_CUDA, _META = (int(kind) for kind in (DeviceType.CUDA, DeviceType.Meta))


class PhantomPlatform(CudaPlatform):
    """The CUDA platform without looking for a GPU; megatron-core is patched for the CPU, as everywhere in the tests."""

    transformer_overrides = CpuPlatform.transformer_overrides

    def __init__(self) -> None:
        self.device = GPU

    def synchronize(self) -> None:
        pass


class MetaPlatform(CpuPlatform):
    """Where a model of any size can be built."""

    def __init__(self) -> None:
        self.device = torch.device("meta")


class PhantomGpu(TorchDispatchMode):
    """Within it tensors on a CUDA device are fake, and those of the CPU are real.

    torch's C++ side asks a device for its guard even to slice a tensor: that of the meta device, which does nothing,
    stands in where there is no CUDA.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        """Copies between the devices that the host waits for: to the GPU where not asynchronous, and all from it."""
        self._fake = FakeTensorMode()
        # megatron-core sets `data` of a tensor that is no view, which a fake one does not survive.
        self._viewless = mock.patch.object(transformer_block, "make_viewless_tensor", lambda inp, **_: inp)

    def __enter__(self) -> Self:
        self._guards = None
        if not torch.cuda.is_available():
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            self._guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
            self._guards[_CUDA] = self._guards[_META]
        self._viewless.start()
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)
        self._viewless.stop()
        if self._guards is not None:
            self._guards[_CUDA] = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        asked = kwargs.get("device")
        if not any(isinstance(each, FakeTensor) for each in tensors) and (asked is None or asked.type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self._count(args[0], out, kwargs.get("non_blocking", False))
        elif func is torch.ops.aten.copy_.default:
            self._count(args[1], args[0], args[2] if len(args) > 2 else False)
        return out

    def empty(self, like: Tensor, device: torch.device) -> Tensor:
        """A fake tensor of this shape and type, on either device."""
        return FakeTensor(self._fake, torch.empty(like.shape, dtype=like.dtype, device="meta"), device)

    def move(self, policy: Policy, vocab: int = VOCAB) -> Policy:
        """The policy itself, its weights now on the GPU."""
        self._replace_weights(policy, GPU, requires_grad=False)
        policy.prepare(vocab, PhantomPlatform())
        return policy

    def policy_of_any_size(self, model: ModelConfig, vocab: int, platform: Platform, recompute: Recompute) -> Policy:
        """One with fake weights on the CPU, whose gradients can be taken."""
        with torch.device("meta"):
            policy = build_policy(model, vocab, MetaPlatform(), recompute)
        self._replace_weights(policy, platform.device, requires_grad=True)
        policy.rotary_pos_emb.inv_freq = torch.ones(model.head_size // 2)
        policy.prepare(vocab, platform)
        return policy

    def _replace_weights(self, policy: Policy, device: torch.device, *, requires_grad: bool) -> None:
        for module in policy.modules():
            for name, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, Parameter(self.empty(weight, device), requires_grad=requires_grad))

    def _as_fake(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _count(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        self.waits += source.device != target.device and not (target.is_cuda and non_blocking)
