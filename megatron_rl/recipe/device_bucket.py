"""Memory of the buckets in which training ranks give weights to vLLM's workers on the same devices. Pure."""

from __future__ import annotations

from typing import Literal

HALF_BYTES: dict[Literal["cpu", "cuda"], int] = {"cpu": 16 << 20, "cuda": 128 << 20}
"""Most bytes of each half of a bucket. On a GPU, a half should take much longer to copy than its messages, which take
less than a millisecond. On a CPU, the C library allocates buffers above 32 MiB from the kernel each time."""
HALVES = 2
"""A rank fills one half while its worker copies the other one."""


def bytes_in_rank(half: int = HALF_BYTES["cuda"]) -> int:
    """Bytes that a training rank allocates on its device to send a version: its bucket, and the parts of weights that
    it sends to other ranks in one round, which it packs first."""
    return HALVES * half + half


def bytes_in_worker(largest: int, half: int = HALF_BYTES["cuda"]) -> int:
    """Bytes that a worker of vLLM allocates on its device besides its model, while it receives a version.

    largest: bytes of the largest weight that one layer loads at once: an embedding, or all experts of a layer.
    """
    # The copies of the halves that contain the weight, of which the first and the last have others too; the weight in
    # Hugging Face's form, which vLLM keeps until the layer is complete; and the layer in which vLLM puts it together
    # before it copies that over the old one.
    return 2 * half + 3 * largest
