"""Bandwidths of a machine with GPUs, and the shares of them that work reaches. Data sheets and rules of thumb."""

MEMORY_SHARE = 0.85
"""Share of the data sheet's bandwidth at which products and attention read: a rule of thumb."""
NETWORK_BYTES_PER_S = 50e9
"""Bandwidth between a GPU and other nodes: one adapter of 400 Gb/s per GPU."""
NETWORK_SHARE = 0.5
"""Share of that bandwidth that transfers reach: a refit over gloo took twice as long as a raw broadcast
(tests/benchmarks/refit.py)."""
HOST_BYTES_PER_S = 25e9
"""Bandwidth between a GPU and its host's memory: less than half of PCIe 5's data sheet."""
LINK_BYTES_PER_S = 450e9
"""Bandwidth between two GPUs of a node in one direction: NVLink of an H100 (data sheet: 900 GB/s in both)."""
MAP_BYTES_PER_S = 200e9
"""Bytes a second of device memory that the driver takes back, or hands out cleared: a rule of thumb."""
