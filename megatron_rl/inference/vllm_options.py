"""Options of `vllm serve` that a run sets itself, and versions of vLLM that were tried. No torch: the configuration and
the login node read it."""

from __future__ import annotations

import re
from collections.abc import Mapping

VLLM_VERSIONS = ("0.32.0", "0.33")
"""Versions of vLLM that were tried: from the first, below the second."""

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head for which vLLM has attention on a CPU. On GPUs multiples of 8 work."""

GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes: default of its option gpu-memory-utilization."""

INEXACT_OPTIONS = ("quantization", "quantization-config", "kv-cache-dtype")
"""Options under which log-probs differ from the trainer's by more than rounding."""

_SERVED = "the run serves the model of its recipe"
_SOCKET = "only the replica's own process reaches vLLM, through a socket"
_SAMPLED = "training needs answers of the policy itself, and their log-probs"
_WEIGHTS = "the run sends the weights"
_LAYOUT = "one vLLM is one replica on one node"

OWNED_OPTIONS: Mapping[str, str] = {
    "model": _SERVED,
    "tokenizer": _SERVED,
    "skip-tokenizer-init": _SERVED,
    "served-model-name": _SERVED,
    "hf-config-path": _SERVED,
    "hf-overrides": _SERVED,
    "revision": _SERVED,
    "tokenizer-revision": _SERVED,
    "dtype": "model.dtype says it",
    "max-model-len": "training.sequence_length says it",
    "max-num-seqs": "inference.max_batch says it",
    "max-num-batched-tokens": "inference.prefill_tokens says it",
    "enable-prefix-caching": "inference.share_prefixes says it",
    "kv-cache-memory-bytes": "inference.cache_tokens says it",
    "num-gpu-blocks-override": "inference.cache_tokens says it",
    "block-size": "inference.page_tokens says it",
    "enforce-eager": "inference.cuda_graphs says it",
    "profiler-config": "profile.generation says it",
    "tensor-parallel-size": "placement.inference.tp says it",
    "pipeline-parallel-size": _LAYOUT,
    "data-parallel-size": _LAYOUT,
    "data-parallel-size-local": _LAYOUT,
    "data-parallel-rank": _LAYOUT,
    "data-parallel-start-rank": _LAYOUT,
    "data-parallel-address": _LAYOUT,
    "data-parallel-rpc-port": _LAYOUT,
    "data-parallel-backend": _LAYOUT,
    "data-parallel-hybrid-lb": _LAYOUT,
    "data-parallel-external-lb": _LAYOUT,
    "data-parallel-multi-port-external-lb": _LAYOUT,
    "prefill-context-parallel-size": _LAYOUT,
    "nnodes": _LAYOUT,
    "node-rank": _LAYOUT,
    "master-addr": _LAYOUT,
    "master-port": _LAYOUT,
    "headless": _LAYOUT,
    "device-ids": _LAYOUT,
    "api-server-count": _LAYOUT,
    "host": _SOCKET,
    "port": _SOCKET,
    "uds": _SOCKET,
    "grpc": _SOCKET,
    "grpc-port": _SOCKET,
    "api-key": _SOCKET,
    "middleware": _SOCKET,
    "root-path": _SOCKET,
    "ssl-keyfile": _SOCKET,
    "ssl-certfile": _SOCKET,
    "ssl-ca-certs": _SOCKET,
    "ssl-cert-reqs": _SOCKET,
    "ssl-ciphers": _SOCKET,
    "enable-scale-out": _SOCKET,
    "logprobs-mode": _SAMPLED,
    "max-logprobs": _SAMPLED,
    "generation-config": _SAMPLED,
    "override-generation-config": _SAMPLED,
    "logits-processors": _SAMPLED,
    "runner": _SAMPLED,
    "seed": "each start of a replica has its own",
    "scheduling-policy": "the check of new weights precedes the answers",
    "stream-interval": "a replica reads answers a few tokens at a time",
    "load-format": _WEIGHTS,
    "weight-transfer-config": _WEIGHTS,
    "worker-cls": _WEIGHTS,
    "worker-extension-cls": _WEIGHTS,
    "enable-lora": _WEIGHTS,
    "enable-sleep-mode": "a replica always generates",
    "disable-log-stats": "metrics of the run come from it",
    "disable-uvicorn-access-log": "a line for each request would fill the replica's log",
    "config": "inference.vllm.args is the place for further options",
}
"""Option of `vllm serve`, without the dashes in front -> why the run sets it itself."""


def option_name(name: str) -> str:
    """The option that a key of `inference.vllm.args` means: underscores are dashes."""
    return name.replace("_", "-")


def owned(name: str) -> str | None:
    """Say why an option cannot be given because the run sets it; None if it can.

    vLLM also reads an option's opposite (no-NAME), its parts (NAME.KEY) and unambiguous beginnings of names.
    """
    plain = option_name(name).partition(".")[0].removeprefix("no-")
    for option, why in OWNED_OPTIONS.items():
        if option == plain or (option.startswith(plain) and len(plain) > 2):
            return f"the run sets --{option} itself: {why}"
    return None


def untried(version: str) -> str | None:
    """Say why a version of vLLM is outside the range that was tried; None if it is inside."""
    lowest, below = VLLM_VERSIONS
    if _numbers(version) < _numbers(lowest):
        return f"vLLM {version} is older than {lowest}, the oldest one that was tried"
    if _numbers(version) >= _numbers(below):
        return f"vLLM {version} is newer than those that were tried, {lowest} and later below {below}"
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """Numbers that a version begins with: (0, 32, 1) of `0.32.1+cpu`."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
