"""Choices of experts that vLLM returns with an answer (`--enable-return-routed-experts`)."""

from __future__ import annotations

from base64 import b64decode
from io import BytesIO

import numpy as np

from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.choices import Choices
from megatron_rl.recipe.config import RunConfig


def returned_form(config: RunConfig) -> ChoiceForm | None:
    """Form of the choices that the vLLM of a replica returns; None if it returns none."""
    return ChoiceForm.of(config.model) if config.model.router_replay == "rollout" else None


def choices_in(routed: str, form: ChoiceForm) -> Choices:
    """Choices of experts in vLLM's array [tokens, layers, chosen] (.npy in base 64), where layers without experts have
    some too. Raises ValueError for an array of another model."""
    rows = np.load(BytesIO(b64decode(routed)), allow_pickle=False)
    own = rows[:, [layer - 1 for layer in form.layers]]
    if own.shape[2:] != (form.chosen,):
        raise ValueError(f"choices of shape {rows.shape} are not of {form.chosen} experts per token")
    return form.listed(own.reshape(len(own), form.numbers))
