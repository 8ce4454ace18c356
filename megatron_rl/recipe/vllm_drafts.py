"""Speculative decoding of a vLLM that the run starts: which drafts leave the answers' distribution as it is. No torch.

vLLM verifies drafts by rejection, so a bad draft costs time and nothing else. What changes the distribution, or drafts
at random, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.recipe.vllm_options import json_object, setting_of

OF_THE_TEXT = ("ngram", "ngram_gpu", "suffix")
"""Methods whose drafts come from the text so far."""
OF_A_MODEL = ("draft_model", "eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark")
"""Methods whose drafts come from another model. So do those of each method whose name ends in mtp."""

_SHORT = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}


def draft_of(args: Mapping[str, bool | int | float | str]) -> dict[str, Any]:
    """Settings of speculative decoding in `inference.vllm.args`, empty without it."""
    return setting_of(args, "speculative-config", _SHORT)


def without_draft(args: Mapping[str, bool | int | float | str]) -> dict[str, bool | int | float | str]:
    """The other options of `inference.vllm.args`."""
    return {name: value for name, value in args.items() if not draft_of({name: value})}


def method_of(draft: Mapping[str, Any]) -> str | None:
    """Method of a draft as vLLM reads its settings: without one, `model` names ngram or a model."""
    named = draft.get("method")
    if named is None and (model := draft.get("model")) is not None:
        named = model if str(model).strip("[]") in OF_THE_TEXT else "draft_model"
    return None if named is None else str(named).strip("[]")


def has_weights(draft: Mapping[str, Any]) -> bool:
    """Whether drafts come from a model with weights."""
    method = method_of(draft)
    return method is not None and method not in OF_THE_TEXT


def draft_faults(args: Mapping[str, bool | int | float | str]) -> list[str]:
    """Say what is wrong with the speculative decoding that options of vLLM ask for."""
    draft = draft_of(args)
    faults = []
    if draft.get("rejection_sample_method") == "synthetic" or any(key.startswith("synthetic") for key in draft):
        faults.append(
            "speculative-config: rejection_sample_method synthetic accepts drafts at random, so answers would not be "
            "the policy's: leave it out"
        )
    method = method_of(draft)
    if method is None or method in OF_THE_TEXT:
        return faults
    if method not in OF_A_MODEL and not method.endswith("mtp"):
        faults.append(f"speculative-config: drafts of {method} are not known to leave answers as they are: take ngram")
    elif draft.get("model") is None or not _loads(draft.get("draft_load_config")):
        faults.append(
            f"speculative-config: the run sends no weights of a draft, so those of {method} would stay random: name a "
            'folder that has them in `model` and add "draft_load_config": {"load_format": "auto"}, or take ngram or '
            "suffix"
        )
    return faults


def _loads(load_config: object) -> bool:
    config = load_config if isinstance(load_config, dict) else json_object(load_config)
    return config.get("load_format", "dummy") != "dummy"
