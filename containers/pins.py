"""Prints pip constraints for the distributions that an image of NVIDIA has in builds of its own, at their versions.

An index has other builds of them, or none. Their versions have a local label, such as 2.4.0+3cd6870, or are
pre-releases, such as 2.8.0a0; or they belong to CUDA or are built against such a package, which OWN lists.
"""

import re
from importlib.metadata import distributions

OWN = ("apex", "cuda-", "cupy-", "flash-attn", "numpy", "nvidia-", "pytorch-triton", "tensorrt", "torch", "triton")
"""Beginnings of names."""
OF_AN_INDEX = re.compile(r"[0-9]+(\.[0-9]+)*(\.post[0-9]+)?")


def pins() -> list[str]:
    found: dict[str, str] = {}
    for distribution in distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"]).lower()
        found.setdefault(name, distribution.version)  # the first on the path is the one that is imported
    return [
        f"{name}=={version}"
        for name, version in sorted(found.items())
        if name.startswith(OWN) or not OF_AN_INDEX.fullmatch(version)
    ]


if __name__ == "__main__":
    print("\n".join(pins()))
