"""Weights and caches of 8 bits in a vLLM that the run starts. No torch.

The run sends weights of the model's dtype. vLLM quantises them layer by layer as they are loaded, at its start and
again at each update (vllm/model_executor/model_loader/reload), which works for the methods of `ONLINE`. All others read
weights that were quantised beforehand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

from megatron_rl.recipe.vllm_options import option_name, setting_of

LINEAR, EXPERTS = "linear", "moe"
"""Kinds of layers, as vLLM's quantization-config names them. Neither has the embedding or the output layer."""
ONLINE: Mapping[str, tuple[str, ...]] = {
    "fp8": (LINEAR, EXPERTS),  # the former name of the next
    "fp8_per_tensor": (LINEAR, EXPERTS),
    "fp8_per_channel": (LINEAR, EXPERTS),
    "fp8_per_block": (LINEAR, EXPERTS),
    "mxfp8": (LINEAR, EXPERTS),
    "int8_per_channel_weight_only": (EXPERTS,),
    "online": (),  # what quantization-config says
}
"""Values of `quantization` of 8 bits, and the layers whose weights they quantise."""
CACHES = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "fp8_per_token_head", "int8_per_token_head")
"""Values of `kv-cache-dtype` of 8 bits."""
WHOLE_CACHES = ("auto", "float16", "bfloat16")
_OWN_CACHES = {"bf16": "bfloat16"}
"""Value of `kv-cache-dtype`, besides auto, that is the model's own dtype."""

Args = Mapping[str, bool | int | float | str]
"""Options in `inference.vllm.args`."""


@dataclass(frozen=True, slots=True)
class Precision:
    weights: Set[str]
    """Kinds of layers that are quantised; a layer that quantization-config names by itself is of the kind `targets`."""
    cache: bool
    """Whether the cache of keys and values has 8 bits."""
    asked: Mapping[str, str]
    """Value of each option that asks for a precision."""

    def beyond(self, dtype: str | None) -> tuple[str, ...]:
        """Options that ask for another precision than that of a model of this dtype, so that log-probs differ from the
        trainer's by more than rounding. dtype: None: unknown."""
        own = ("auto", _OWN_CACHES.get(dtype or ""))
        return tuple(
            name for name, value in self.asked.items() if option_name(name) != "kv-cache-dtype" or value not in own
        )


def precision_of(args: Args) -> Precision:
    method, cache, further = _asked(args)
    named = {kind for kind in (LINEAR, EXPERTS, "targets") if further.get(kind)}
    return Precision(named | {*ONLINE.get(method or "", ())}, cache in CACHES, dict(_options(args)))


def precision_faults(args: Args) -> Iterator[str]:
    """Say which precisions cannot be had, and what to take instead."""
    method, cache, further = _asked(args)
    if method is not None and method not in ONLINE and not _is_short(method):
        known = ", ".join(name for name in ONLINE if name not in ("fp8", "online"))
        yield (
            f"inference.vllm.args.quantization {method} reads weights that were quantised beforehand, and the run "
            f"sends new ones at each update, which vLLM quantises itself with {known}: take one of these"
        )
    short = [name for name in (method, cache, *_names(further)) if name is not None and _is_short(name)]
    if short:
        yield (
            f"inference.vllm.args has {short[0]}, of fewer than 8 bits: log-probs would differ from the trainer's by "
            "as much as wrong weights can, so that no check would find those; take FP8"
        )
    elif cache is not None and cache not in (*CACHES, *WHOLE_CACHES):
        known = ", ".join((*WHOLE_CACHES, *CACHES))
        yield f"inference.vllm.args.kv-cache-dtype {cache} is none that is known here: {known}"


def _asked(args: Args) -> tuple[str | None, str | None, dict[str, Any]]:
    """Values of quantization and kv-cache-dtype, None if they are not given, and the fields of quantization-config."""
    plain = {option_name(name): str(value) for name, value in args.items()}
    return plain.get("quantization"), plain.get("kv-cache-dtype"), setting_of(args, "quantization-config")


def _options(args: Args) -> Iterator[tuple[str, str]]:
    for name, value in args.items():
        if option_name(name).partition(".")[0] in ("quantization", "quantization-config", "kv-cache-dtype"):
            yield name, str(value)


def _is_short(name: str) -> bool:
    return re.search(r"fp4|int4|4bit|3bit|k8v4|k3v4", name) is not None


def _names(further: Any) -> Iterator[str]:
    """All names of precisions in quantization-config, however deep. Patterns of layers are keys, or in `ignore`."""
    if isinstance(further, str):
        yield further
    elif isinstance(further, Mapping):
        for key, value in further.items():
            if key != "ignore":
                yield from _names(value)
