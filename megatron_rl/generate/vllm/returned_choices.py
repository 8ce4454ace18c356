"""Choices of experts that vLLM returns with an answer (`--enable-return-routed-experts`)."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO

import numpy as np

from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.vllm_releases import RELEASES, VllmRelease


def returns_choices(config: RunConfig) -> bool:
    """Whether vLLM returns the experts that it chose for each token."""
    return config.model.router_replay == "rollout"


def returned_form(config: RunConfig, release: VllmRelease) -> ChoiceForm | None:
    """Form of the choices that a replica's vLLM returns; None if the run needs none. Raises ConfigurationError if this
    release returns none."""
    if not returns_choices(config):
        return None
    if not release.returns_choices:
        first = next(row.first for row in RELEASES if row.returns_choices)
        raise ConfigurationError(
            f"model.router_replay is rollout, and vLLM before {first} does not return the experts that it chose: "
            f"install {first}, or set router_replay to old"
        )
    return ChoiceForm.of(config.model)


def choices_in(routed: str, form: ChoiceForm) -> Choices:
    """Choices of experts in vLLM's array [tokens, layers, chosen] (.npy in base 64), where layers without experts have
    some too. Raises ValueError for an array of another model."""
    rows = np.load(BytesIO(b64decode(routed)), allow_pickle=False)
    own = rows[:, [layer - 1 for layer in form.layers]]
    if own.shape[2:] != (form.chosen,):
        raise ValueError(f"choices of shape {rows.shape} are not of {form.chosen} experts per token")
    return form.listed(own.reshape(len(own), form.numbers))
