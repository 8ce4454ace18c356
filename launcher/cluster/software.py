"""Container image and Python of the ranks of a run, and of vLLM's replicas, which may have their own. Pure."""

from __future__ import annotations

import sys

from launcher.cluster.profile import Profile
from megatron_rl.config import RunConfig


def rank_image(config: RunConfig, profile: Profile | None) -> str | None:
    """Reference of the ranks' image; None: they run without a container."""
    container = profile.container if profile else None
    return (config.image.reference or container.image) if container else None


def replica_image(config: RunConfig, profile: Profile | None) -> str | None:
    """Reference of the image that only the inference replicas run in; None: they run as the training ranks do."""
    image, vllm = rank_image(config, profile), config.inference.own_vllm
    own = vllm.image if vllm and image else None
    return own if own != image else None


def rank_python(profile: Profile | None) -> str:
    """Python of the ranks. `profile` None: this machine."""
    if profile is None:
        return sys.executable
    return profile.python or ("python3" if profile.container else sys.executable)


def replica_python(config: RunConfig, profile: Profile | None) -> str:
    """Python of the inference replicas. In an image of their own the path of the ranks' Python means nothing."""
    vllm = config.inference.own_vllm
    if vllm and vllm.python:
        return vllm.python
    return rank_python(profile) if replica_image(config, profile) is None else "python3"
