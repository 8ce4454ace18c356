"""Container image and Python of the ranks of a run, and of vLLM's replicas, which may have their own. Pure."""

from __future__ import annotations

import sys

from launcher.cluster.profile import Profile
from megatron_rl.contract.paths import INFER
from megatron_rl.recipe.config import RunConfig


def rank_image(config: RunConfig, profile: Profile | None) -> str | None:
    container = profile.container if profile else None
    return (config.image.reference or container.image) if container else None


def replica_image(config: RunConfig, profile: Profile | None) -> str | None:
    """Reference of the image that only the replicas with vLLM run in; None: they run as the training ranks do."""
    image = rank_image(config, profile)
    own = next((vllm.image for vllm in config.started_vllms.values()), None) if image else None
    return own if own != image else None


def rank_python(profile: Profile | None) -> str:
    if profile is None:
        return sys.executable
    return profile.python or ("python3" if profile.container else sys.executable)


def replica_python(config: RunConfig, profile: Profile | None, kind: str = INFER) -> str:
    """Python of the replicas of a kind. In a separate image the path of the ranks' Python means nothing."""
    vllm = config.started_vllms.get(kind)
    if vllm and vllm.python:
        return vllm.python
    return "python3" if vllm and replica_image(config, profile) else rank_python(profile)
