"""Import this before megatron-core: what it would load on import, and no run of ours needs by then, is not loaded.

It decorates some seventy functions with torch.compile, which loads torch's compilers, and asks whether there is a
wandb, which in a run of ours is another process's (metrics/wandb/). Together half of what a rank takes to start.

Nor does it find Apex and Transformer Engine, which are in NVIDIA's images, but for the latter where it was imported
before, by who wants its linears (implementation.py). Where megatron-core can import them it takes their norm for the
last layer and their Adam, whatever the layers are made of: a CPU can run neither, and a checkpoint of one device would
lack what the other asks for. So Adam is torch's in any case, and without Transformer Engine's linears the modules of a
run are the same everywhere. Who wants a kernel of theirs can import them himself, after this.

Nor are its warnings shown, nor those of torch.distributed about it, thirty at the head of every log: who starts a run
can do nothing about them. PYTHONWARNINGS=default shows them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch


def _compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """torch.compile, put off until the first call."""
    if function is None:
        return functools.partial(_compiled_when_called, **options)
    compile_ = functools.cache(lambda: _compile(function, **options))

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return compile_()(*given, **named)

    return call


@contextmanager
def not_found(*names: str) -> Iterator[None]:
    """Who imports these meanwhile finds none of them."""
    found = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None: as if they were not installed
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(found)


_compile = torch.compile
_NOT_FOUND = ("wandb", "transformer_engine", "apex", "amp_C")
_NEVER_FOUND = "transformer_engine.pytorch.optimizers"

if not sys.warnoptions:
    for module in (r"megatron\.", r"torch\.distributed\."):
        warnings.filterwarnings("ignore", module=module)
with (
    not_found(*(name for name in _NOT_FOUND if name not in sys.modules), _NEVER_FOUND),
    mock.patch.object(torch, "compile", _compiled_when_called),
):
    # All that asks for them.
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
