"""Release of NCCL in a process.

Only the function imports torch, so that `mrl doctor --deep` can send this file into any image, and ctypes, which would
slow the launcher's commands.
"""

from __future__ import annotations

import os


def nccl_release() -> str:
    """Return the release of NCCL that this process uses, as NCCL itself compares it, such as 2.27.3. torch reports the
    one that it was compiled with, and LD_PRELOAD may have brought another. torch must be a build with NCCL."""
    import ctypes

    import torch

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD).ncclGetVersion(ctypes.byref(number))
    except OSError:  # it is part of torch's own library
        return ".".join(map(str, torch.cuda.nccl.version()))
    major, rest = divmod(number.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"
