"""Penalties and biases of the logits, for rows whose requests use them.

Definitions follow vLLM: presence and frequency count tokens of the answer, repetition looks at prompt and answer. They
are computed from the tokens at each step, so a moved or interrupted row has no counts to lose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.generate.engine.admission import Prefill
from megatron_rl.recipe.inference import MOST_BIASED, AdjustedSampling


@dataclass(frozen=True, slots=True)
class _Adjustments:
    """Parameters of all rows. A row without adjustments has neutral values, which change no bit of its logits."""

    presence: Tensor
    frequency: Tensor
    repetition: Tensor
    biased: Tensor
    """[rows, MOST_BIASED] tokens with a bias, padded with token 0."""
    bias: Tensor
    """[rows, MOST_BIASED] their biases, padded with 0."""
    prompts: Tensor
    """[rows, max_length] tokens of prompts with a repetition penalty, padded with `vocab`, which is not a token."""


class AdjustedRows:
    """Parameters of the rows, in tensors that are allocated when a row first needs them."""

    def __init__(self, rows: int, max_length: int, vocab: int, device: torch.device) -> None:
        """max_length: tokens of a prompt and its answer together."""
        self._rows, self._max_length, self._vocab, self._device = rows, max_length, vocab, device
        self._asks = np.zeros(rows, dtype=np.bool_)
        self._tensors: _Adjustments | None = None

    def set(self, rows: slice, prefill: Prefill) -> None:
        sampling = prefill.sampling
        asks = isinstance(sampling, AdjustedSampling) and sampling.changes_logits
        if asks or self._asks[rows].any():
            asked = sampling if isinstance(sampling, AdjustedSampling) else AdjustedSampling(max_new_tokens=1)
            self._set(self._allocated(), rows, asked, prefill.penalized)
        self._asks[rows] = asks

    def _set(self, tensors: _Adjustments, rows: slice, asked: AdjustedSampling, prompt: list[int]) -> None:
        tensors.presence[rows] = asked.presence_penalty
        tensors.frequency[rows] = asked.frequency_penalty
        tensors.repetition[rows] = asked.repetition_penalty
        tensors.biased[rows], tensors.bias[rows], tensors.prompts[rows] = 0, 0.0, self._vocab
        if asked.logit_bias:
            tokens, biases = zip(*asked.logit_bias, strict=True)
            tensors.biased[rows, : len(tokens)] = self._sent(tokens, torch.long)
            tensors.bias[rows, : len(biases)] = self._sent(biases, torch.float)
        if prompt:
            tensors.prompts[rows, : len(prompt)] = self._sent(prompt, torch.long)

    def _sent(self, values: Any, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device, non_blocking=True)

    def _allocated(self) -> _Adjustments:
        if self._tensors is None:
            options: dict[str, Any] = {"device": self._device}
            self._tensors = _Adjustments(
                presence=torch.zeros(self._rows, 1, **options),
                frequency=torch.zeros(self._rows, 1, **options),
                repetition=torch.ones(self._rows, 1, **options),
                biased=torch.zeros(self._rows, MOST_BIASED, dtype=torch.long, **options),
                bias=torch.zeros(self._rows, MOST_BIASED, **options),
                prompts=torch.full((self._rows, self._max_length), self._vocab, **options),
            )
        return self._tensors

    def move(self, sources: list[int], targets: list[int], source: Tensor, target: Tensor) -> None:
        """Copy the rows `sources` to the rows `targets`; the tensors hold the same numbers on the device."""
        if self._tensors is not None and (self._asks[sources].any() or self._asks[targets].any()):
            tensors = self._tensors
            for column in (
                tensors.presence, tensors.frequency, tensors.repetition, tensors.biased, tensors.bias, tensors.prompts,
            ):  # fmt: skip
                column[target] = column[source]
        self._asks[targets] = self._asks[sources]

    def asks(self, rows: slice) -> bool:
        return bool(self._asks[rows].any())

    def adjusted(self, rows: slice, logits: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
        """Return the logits to sample these rows from, [rows, vocab] fp32.

        logits [rows, vocab] of the policy; tokens [rows, max_length] of answers; the first `count` [rows] are sampled.
        """
        tensors = self._allocated()
        logits = logits.float().scatter_add(1, tensors.biased[rows], tensors.bias[rows])
        later = torch.arange(tokens.shape[1], device=self._device) >= count[:, None]
        none = torch.zeros(logits.shape[0], self._vocab + 1, device=self._device)
        answer = tokens.masked_fill(later, self._vocab)
        often = none.scatter_add(1, answer, torch.ones_like(answer, dtype=none.dtype))[:, :-1]
        seen = (none.scatter(1, tensors.prompts[rows], 1.0)[:, :-1] + often) > 0
        repetition = tensors.repetition[rows]
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen, repeated, logits)
        return logits - tensors.frequency[rows] * often - tensors.presence[rows] * (often > 0)
