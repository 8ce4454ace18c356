"""Options of `vllm serve` that a run sets itself. No torch: the configuration and the login node read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that read records need no schema of recipes
    from megatron_rl.recipe.model import ModelConfig

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of an attention head for which vLLM has attention on a CPU. On GPUs multiples of 8 work."""
CPU_LATENT = (512, 64)
"""kv_lora_rank and qk_rope_head_dim for which vLLM has latent attention on a CPU."""

GPU_SHARE_OPTION = "gpu-memory-utilization"
GPU_SHARE = 0.92
"""Share of a GPU's memory that vLLM 0.32 takes: default of GPU_SHARE_OPTION."""


def heads_beyond_cpu(model: ModelConfig) -> str | None:
    """Say which sizes of a model vLLM cannot attend with on a CPU, and which it can; None if it can."""
    if latent := model.latent_attention:
        sizes = latent.kv_lora_rank, latent.qk_rope_head_dim
        if sizes == CPU_LATENT:
            return None
        given = "latent attention with kv_lora_rank {} and qk_rope_head_dim {}".format(*sizes)
        return f"{given}, and vLLM on a CPU supports {CPU_LATENT[0]} and {CPU_LATENT[1]}"
    if model.head_size in CPU_HEAD_SIZES:
        return None
    known = ", ".join(map(str, CPU_HEAD_SIZES))
    return f"attention heads of size {model.head_size}, and vLLM on a CPU supports {known}"


_OWNED = {
    "the run serves the model of its recipe": (
        "model tokenizer skip-tokenizer-init served-model-name hf-config-path hf-overrides revision tokenizer-revision"
    ),
    "model.dtype says it": "dtype",
    "model.router_replay says it": "enable-return-routed-experts aux-output-config",
    "training.sequence_length says it": "max-model-len",
    "inference.max_batch says it": "max-num-seqs",
    "inference.prefill_tokens says it": "max-num-batched-tokens",
    "inference.share_prefixes says it": "enable-prefix-caching",
    "inference.cache_tokens says it": "kv-cache-memory-bytes num-gpu-blocks-override",
    "inference.page_tokens says it": "block-size",
    "inference.cuda_graphs says it": "enforce-eager",
    "profile.generation says it": "profiler-config",
    "placement.inference.tp says it": "tensor-parallel-size",
    "placement.inference says it": "pipeline-parallel-size data-parallel-size enable-expert-parallel",
    "one vLLM is one replica on the nodes that the run gives it": (
        "data-parallel-size-local data-parallel-rank "
        "data-parallel-start-rank data-parallel-address data-parallel-rpc-port data-parallel-backend "
        "data-parallel-hybrid-lb data-parallel-external-lb data-parallel-multi-port-external-lb "
        "prefill-context-parallel-size nnodes node-rank master-addr master-port headless device-ids "
        "api-server-count"
    ),
    "the run sends each worker its own experts": "expert-placement-strategy enable-eplb eplb-config enable-elastic-ep",
    "only the replica's own process reaches vLLM, through a socket": (
        "host port uds grpc grpc-port api-key middleware root-path ssl-keyfile ssl-certfile ssl-ca-certs "
        "ssl-cert-reqs ssl-ciphers enable-scale-out"
    ),
    "training needs answers of the policy itself, and their log-probs": (
        "logprobs-mode max-logprobs generation-config override-generation-config logits-processors runner "
        "structured-outputs-config reasoning-parser"
    ),
    "each start of a replica has its own": "seed",
    "the check of new weights precedes the answers": "scheduling-policy",
    "a replica reads answers a few tokens at a time": "stream-interval",
    "the run sends the weights": ("load-format weight-transfer-config worker-cls worker-extension-cls enable-lora"),
    "placement.offload says it": "enable-sleep-mode",
    "metrics of the run come from it": "disable-log-stats",
    "a line for each request would fill the replica's log": "disable-uvicorn-access-log",
    "inference.vllm.args is the place for further options": "config",
}
"""Why the run sets options of `vllm serve` itself -> those options, without the dashes in front."""
OWNED_OPTIONS: Mapping[str, str] = {option: why for why, options in _OWNED.items() for option in options.split()}


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


def option_word(name: str, value: str | bool) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def given_options(args: Mapping[str, bool | int | float | str]) -> dict[str, str | bool]:
    """Options of `inference.vllm.args` as vLLM reads them."""
    return {option_name(name): value if isinstance(value, bool) else str(value) for name, value in args.items()}


def setting_of(
    args: Mapping[str, bool | int | float | str], option: str, short: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Any]:
    """Fields of an option that takes a JSON object, empty without it: of the object, and of its parts (OPTION.FIELD).

    short: options for one field each -> that field.
    """
    found: dict[str, Any] = {}
    for name, value in args.items():
        given, _, part = name.partition(".")
        given = option_name(given)
        if given in short:
            found[short[given]] = value
        elif len(given) > 4 and option.startswith(given) and given not in _OWN_NAMES:
            found |= json_object(value) if not part else _nested(part.replace("-", "_"), value)
    return {key.replace("-", "_"): value for key, value in found.items()}


_OWN_NAMES = ("quantization",)
"""Options whose names are the beginning of another option's."""


def json_object(value: object) -> dict[str, Any]:
    """A JSON object; empty if it is none, which vLLM's parser reports."""
    try:
        found = json.loads(str(value))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: _nested(rest, value) if rest else value}
