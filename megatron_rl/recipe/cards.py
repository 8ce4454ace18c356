"""Figures of NVIDIA's data sheets. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    name: str
    """Part of torch's name of the device."""
    bf16_flops: float
    """Peak operations per second of dense matrix products in bf16."""
    memory_bytes_per_s: float
    capability: tuple[int, int] = (0, 0)
    """CUDA's compute capability; (0, 0): none."""


CARDS = (
    Card("GB200", 2500e12, 8.0e12, (10, 0)),
    Card("B200", 2250e12, 8.0e12, (10, 0)),
    Card("H200 NVL", 835e12, 4.8e12, (9, 0)),
    Card("H200", 989e12, 4.8e12, (9, 0)),
    Card("H100 PCIe", 756e12, 2.0e12, (9, 0)),
    Card("H100 NVL", 835e12, 3.9e12, (9, 0)),
    Card("H100", 989e12, 3.35e12, (9, 0)),
    Card("A100", 312e12, 2.04e12, (8, 0)),
)
"""Cards in order of matching: the first whose name is part of a device's name. The A100 is the 80 GB model."""

FP8_CAPABILITY = (8, 9)


def without_fp8(name: str, capability: tuple[int, int]) -> str | None:
    """Say why a GPU cannot compute in FP8; None if it can."""
    if capability >= FP8_CAPABILITY:
        return None
    own, needed = (".".join(map(str, each)) for each in (capability, FP8_CAPABILITY))
    return f"{name} has compute capability {own}, and FP8 needs {needed} or later (such as an H100): set it to none"


def find_card(device: str) -> Card | None:
    """Find the card by torch's name of the device; None if its figures are unknown."""
    return next((card for card in CARDS if card.name.lower() in device.lower()), None)
