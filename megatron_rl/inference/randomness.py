"""Counter-based random numbers: the uniform of token t of a sample is a function of (key, sample, t) alone.

So an answer does not depend on the time, the rank, its neighbours in the batch or where a restart cut it.
The generator is SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195) used as a hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(keys: ArrayLike, samples: ArrayLike, count: int) -> NDArray[np.float64]:
    """[rows, count] numbers in [0, 1) with 53 random bits; row i belongs to sample samples[i] of keys[i].

    keys: of 64 bits, [rows] or one for all rows.
    """
    rows = _GOLDEN * (np.asarray(samples, dtype=np.uint64) + np.uint64(1))
    stream = _mix(np.asarray(keys, dtype=np.uint64) + rows)
    counters = _GOLDEN * np.arange(1, count + 1, dtype=np.uint64)
    bits = _mix(stream[:, None] + counters[None, :])
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
