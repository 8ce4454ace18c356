"""A teacher on the training ranks: another model, or the policy itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.divergences import Distributions, TopTokens, WholeVocabulary, aligned, top_tokens
from megatron_rl.learn.training.objective import FirstPass, Judgement
from megatron_rl.learn.training.schedule import ModelInput
from megatron_rl.model.policy import OutputPart, Policy
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import DistillConfig, DivergenceConfig

SLAB_BYTES = 2**26
"""Bytes of host memory that context-parallel ranks exchange at a time, by way of the device."""


@dataclass(frozen=True, slots=True)
class TeacherOnRanks:
    policy: Policy
    """The teacher, or the trained policy, which teaches itself."""
    divergence: DivergenceConfig | None = None
    """Divergence from the teacher that the loss reads; None: it reads log-probs alone."""
    output: Callable[[], OutputPart] | None = None
    """Returns the output layer of the teacher, split like the policy's, on the last stage; None without
    `divergence`."""
    temperature: float = 1.0
    """Temperature of the divergence."""

    @classmethod
    def of(cls, teacher: Policy, policy: Policy, config: RunConfig, distill: DistillConfig) -> TeacherOnRanks:
        """Return a teacher of a run. Collective over the tensor-parallel ranks."""
        if (divergence := distill.divergence) is None:
            return cls(teacher)
        output: Callable[[], OutputPart] | None = None
        if not policy.post_process:
            pass
        elif teacher is policy:
            output = partial(_present, policy, changes=config.grpo.updates_per_step > 1)
        else:
            part = aligned(teacher.output(), policy.output())
            if not teacher.share_embeddings_and_output_weights:  # so that its own rows are freed
                teacher.output_layer.weight.data = part.weight
            output = partial(_same, part)
        return cls(teacher, divergence, output, divergence.temperature or config.sampling.temperature)

    def __call__(self, first_pass: FirstPass) -> Judgement:
        if self.output is None or self.divergence is None:
            return Judgement(first_pass.under_another(self.policy))
        kept = _Kept(first_pass)
        count, output = self.divergence.top_k, self.output()

        def heard(hidden: Tensor, read: ModelInput) -> None:
            if count is None:
                kept.put(read.trained, hidden)
                return
            allowed = first_pass.batch.allowed_at(read.trained)
            found = top_tokens(hidden, output, count, self.temperature, allowed=allowed)
            kept.put(read.trained, found.tokens, found.logprobs)

        logprobs = first_pass.under_another(self.policy, heard)
        return Judgement(logprobs, kept.distributions(output, first_pass.context, self.policy.device))


def _same(output: OutputPart) -> OutputPart:
    return output


def _present(policy: Policy, *, changes: bool) -> OutputPart:
    """Return the policy's output layer as it is now. changes: whether later updates of the step read it too."""
    output = policy.output()
    weight = output.weight.detach()
    return replace(output, weight=weight.clone() if changes else weight)


class _Kept:
    """Rows of the trained tokens in host memory: those of a step may exceed the device's."""

    def __init__(self, first_pass: FirstPass) -> None:
        self._rows, self._row = first_pass.rows, first_pass.row
        self._held: list[Tensor] = []

    def put(self, index: Tensor, *rows: Tensor) -> None:
        if not self._held:
            self._held = [torch.zeros((self._rows, each.shape[1]), dtype=each.dtype) for each in rows]
        for held, each in zip(self._held, rows, strict=True):
            held[index.cpu() if self._row is None else self._row[index.cpu()]] = each.cpu()

    def distributions(
        self, output: OutputPart, context: dist.ProcessGroup, device: torch.device
    ) -> Distributions | None:
        """Return the distributions of all tokens; None if this rank was asked to leave before it heard any. Collective
        over the context-parallel ranks; each has heard its part of the tokens."""
        if context.size() > 1:
            for held in self._held:
                rows = max(1, SLAB_BYTES // (held.shape[1] * held.element_size()))
                for slab in held.split(rows):
                    summed = slab.to(device)
                    dist.all_reduce(summed, group=context)
                    slab.copy_(summed)
        if not self._held:
            return None
        return WholeVocabulary(self._held[0], output) if len(self._held) == 1 else TopTokens(*self._held)
