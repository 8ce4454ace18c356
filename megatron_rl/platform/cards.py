"""What NVIDIA's data sheets say of its cards. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """One kind of GPU."""

    name: str
    """A part of torch's name of the device."""
    bf16_flops: float
    """Peak of dense matrix products in bf16, a second."""
    memory_bytes_per_s: float
    """Of its own memory."""


CARDS = (
    Card("GB200", 2500e12, 8.0e12),
    Card("B200", 2250e12, 8.0e12),
    Card("H200 NVL", 835e12, 4.8e12),
    Card("H200", 989e12, 4.8e12),
    Card("H100 PCIe", 756e12, 2.0e12),
    Card("H100 NVL", 835e12, 3.9e12),
    Card("H100", 989e12, 3.35e12),
    Card("A100", 312e12, 2.04e12),
)
"""The first whose name is part of a device's counts. The A100 is the one of 80 GB."""


def find_card(device: str) -> Card | None:
    """The card that a device is, by torch's name for it; None where its figures are not known."""
    return next((card for card in CARDS if card.name.lower() in device.lower()), None)
