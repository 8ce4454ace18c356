"""Random numbers of a token: a function of key, sample and position, and practically independent."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from megatron_rl.generate.engine.sampling import uniforms

KEYS = st.integers(0, 2**64 - 1)


def test_numbers_are_the_same_on_every_machine_and_version() -> None:
    """A checkpoint must resume with the same answers elsewhere. SplitMix64 in plain integers, without numpy."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden, key = 0x9E3779B97F4A7C15, 2**64 - 3
    for sample in range(3):
        for token in range(4):
            bits = mix((mix((key + golden * (sample + 1)) % 2**64) + golden * (token + 1)) % 2**64)
            assert uniforms(key, range(3), 4)[sample, token] == (bits >> 11) / 2**53


def test_neighbouring_keys_samples_and_positions_are_uniform_and_uncorrelated() -> None:
    """Keys, samples and positions of 0 to 63, 31 and 31: the range of a run's own counters."""
    numbers = np.stack([uniforms(key, range(32), 32) for key in range(64)])
    count = numbers.size
    assert len(np.unique(numbers)) == count
    cells, _ = np.histogram(numbers, bins=64, range=(0, 1))
    chi_square = float(((cells - count / 64) ** 2 / (count / 64)).sum())
    assert chi_square < 63 + 4 * (2 * 63) ** 0.5
    for axis in range(3):
        one, other = np.moveaxis(numbers, axis, 0)[:-1].ravel(), np.moveaxis(numbers, axis, 0)[1:].ravel()
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / len(one) ** 0.5
