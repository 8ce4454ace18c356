"""Import this before megatron-core: what it would load on import, and no run of ours needs by then, is not loaded.

It decorates some seventy functions with torch.compile, which loads torch's compilers, and asks whether there is a
wandb, which in a run of ours is another process's (metrics/wandb/). Together half of what a rank takes to start.

Nor are its warnings shown, nor those of torch.distributed about it, thirty at the head of every log: who starts a run
can do nothing about them. PYTHONWARNINGS=default shows them.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch


def _compiled_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """torch.compile, put off until the first call."""
    if function is None:
        return functools.partial(_compiled_when_called, **options)
    compile_ = functools.cache(functools.partial(_compile, function, **options))

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return compile_()(*given, **named)

    return call


_compile = torch.compile

if not sys.warnoptions:
    for module in (r"megatron\.", r"torch\.distributed\."):
        warnings.filterwarnings("ignore", module=module)
sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # as if it were not installed
try:
    with mock.patch.object(torch, "compile", _compiled_when_called):
        import megatron.core  # noqa: F401
finally:
    if sys.modules["wandb"] is None:
        del sys.modules["wandb"]
