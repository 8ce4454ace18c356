"""Imports megatron-core without what its import would load and mrl does not need. Import this before megatron-core.

megatron-core decorates some seventy functions with torch.compile, which loads torch's compilers, and looks for wandb,
which mrl runs in a separate process (metrics/wandb/). Together that takes half of a rank's start. It also looks for
TensorBoard, to which only rank 0 writes, for Triton, which has no kernels for CPUs, and in release 0.16 for what its
FSDP alone needs, which mrl does not use: torch's distributed tensors, FSDP and checkpoints, and with them a library for
symbolic mathematics. In 0.19 its own checkpoints need them at once. torch's optimizers load its compilers too, only to
be left out of what they compile.

It also must not find Apex and Transformer Engine, which NVIDIA's images contain, unless implementation.py imported the
latter before because its linears are used. If it can import them, it uses their norm for the last layer and their Adam,
whatever the layers are made of: a CPU can run neither, and a checkpoint of one device would lack state that the other
needs. So Adam is always torch's, and without Transformer Engine's linears a run has the same modules everywhere. Code
that needs one of their kernels can import it after this. Nor must it find nvidia-resiliency-ext, whose checkpoints mrl
does not use: beside releases before 0.6, which NVIDIA's images have, megatron-core 0.19 cannot be imported.

Warnings of megatron-core, and of torch.distributed about it, are hidden: there are thirty at the head of every log, and
users can do nothing about them. PYTHONWARNINGS=default shows them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest import mock

import torch


def _compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    if function is None:
        return functools.partial(_compiled_when_called, **options)
    compile_ = functools.cache(lambda: _compile(function, **options))

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return compile_()(*given, **named)

    return call


def _leave_optimizers_to_run() -> None:
    """Undo what torch (seen in 2.11 and 2.13) does to optimizers for its compilers, which mrl gives none: the first
    update would load them, half a second. See `torch._disable_dynamo` and `_use_grad_for_differentiable`."""
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        if plain := getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None):
            plain.__dynamo_disable = plain  # where torch keeps the function that its compilers leave out
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        if plain := getattr(vars(kind).get("step"), "__wrapped__", None):
            kind.step = _with_grad_as_asked(plain)  # type: ignore[method-assign]


def _with_grad_as_asked(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def call(optimizer: torch.optim.Optimizer, *given: Any, **named: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return step(optimizer, *given, **named)

    return call


@contextmanager
def not_found(*names: str) -> Iterator[None]:
    with _replaced(dict.fromkeys(names)):  # None makes an import fail
        yield


@contextmanager
def _replaced(modules: Mapping[str, Any]) -> Iterator[None]:
    """Replace modules, whether loaded or not, for as long as others are imported."""
    found = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(found)


_compile = torch.compile
_NOT_FOUND = ["wandb", "transformer_engine", "apex", "amp_C", "nvidia_resiliency_ext", "torch.utils.tensorboard"]
_UNUSED: dict[str, Any] = {}
"""Modules that megatron-core imports for its FSDP without looking whether they are there."""
if version("megatron-core").startswith("0.16."):
    _NOT_FOUND += ["torch.distributed._tensor", "torch.distributed.tensor", "torch.distributed.fsdp"]
    _UNUSED["torch.distributed.checkpoint"] = mock.MagicMock(__spec__=None)
if torch.version.cuda is None and torch.version.hip is None:
    _NOT_FOUND.append("triton")
_NEVER_FOUND = "transformer_engine.pytorch.optimizers"

_leave_optimizers_to_run()
if not sys.warnoptions:
    for module in (r"megatron\.", r"torch\.distributed\."):
        warnings.filterwarnings("ignore", module=module)
with (
    not_found(*(name for name in _NOT_FOUND if name not in sys.modules), _NEVER_FOUND),
    _replaced({name: module for name, module in _UNUSED.items() if name not in sys.modules}),
    mock.patch.object(torch, "compile", _compiled_when_called),
):
    # Only these parts of megatron-core look for them.
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
