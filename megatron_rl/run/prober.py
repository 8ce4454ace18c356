"""Log-probs of a short text under the trainer's weights, which an engine that got them must report too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.algorithms.logprobs import predicted_logprobs
from megatron_rl.algorithms.packing import pack
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.learn.training.schedule import ModelInput, Pipeline, forward
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.run.probe_tolerance import tolerance_of

logger = logging.getLogger("megatron_rl")

TOKENS = 64
"""Most tokens of a probe: enough that all layers and positions have an effect, and as cheap as a short prompt."""


def probe_text(prompts: Iterable[str], tokenizer: Tokenizer, longest: int) -> list[int]:
    """Tokens of a probe: those of the first prompts, repeated if they are few.

    longest: tokens of the longest sequence; one is left for an engine that must sample.
    """
    found: list[int] = []
    for prompt in islice(prompts, TOKENS):
        found += tokenizer.encode(prompt)
        if len(found) >= TOKENS:
            break
    return (found * TOKENS)[: min(TOKENS, longest - 1)]


class Prober:
    """Measures log-probs of a short text under the trainer's weights, with which engines are probed."""

    def __init__(self, policy: Policy, tokens: Sequence[int], groups: Groups, *, quantised: bool = False) -> None:
        """
        policy: the trainer's.
        tokens: see `probe_text`; equal on all ranks.
        quantised: whether weights or caches of the engines have fewer bits than the trainer's.
        """
        self._tolerance = tolerance_of(policy.config.params_dtype, quantised=quantised)
        self._policy, self._tokens, self._groups = policy, tuple(tokens), groups
        self._pipeline = Pipeline(groups)
        (batch,) = pack([[*tokens]], [[False, *[True] * (len(tokens) - 1)]], [0], len(tokens))
        self._input = ModelInput.of(policy, batch, groups.context)

    def measure(self) -> Probe | None:
        """Measure the probe of the current weights; None if their log-probs are not finite, which no engine causes.
        Collective over all ranks, and equal on all."""
        logprobs = self._logprobs().tolist()
        try:
            return Probe(self._tokens, tuple(logprobs), self._tolerance)
        except ValueError as error:
            logger.warning("engines are not probed with these weights: %s", error)
            return None

    def _logprobs(self) -> Tensor:
        """[tokens - 1] on every rank."""
        scores = torch.zeros(len(self._tokens) - 1, device=self._policy.device)
        output = self._policy.output() if self._pipeline.last else None

        def receive(hidden: Tensor, read: ModelInput) -> None:
            assert output is not None
            scores[read.trained], _ = predicted_logprobs(hidden, output, read.targets, 1.0, entropy="none")

        forward(self._policy, [self._input], receive, self._pipeline, stop=lambda: False)
        for group in (self._groups.context, self._groups.pipeline):  # each token is predicted on one of these ranks
            if group.size() > 1:
                dist.all_reduce(scores, group=group)
        return scores
