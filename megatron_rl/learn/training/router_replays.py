"""Replay of routers in a step: which experts process each token of its micro-batches, as `model.router_replay` says."""

from __future__ import annotations

from torch import Tensor

from megatron_rl.algorithms.packed_choices import PackedChoices
from megatron_rl.algorithms.packing import MicroBatch
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.policy import Policy
from megatron_rl.model.router import Replay
from megatron_rl.model.router_replay import FirstChoices, GivenChoices, ReplayTally
from megatron_rl.rank.metrics.stats import RouterStats
from megatron_rl.recipe.model import ModelConfig


class RouterReplays:
    """Replays of one step, and what they count."""

    def __init__(self, policy: Policy, model: ModelConfig) -> None:
        self._policy, self._form = policy, ChoiceForm.of(model)
        self._rollout = model.router_replay == "rollout"
        self._tally = ReplayTally.on(policy.device)
        own = {layer.layer_number for layer in policy.decoder.layers}
        self._columns = [column for column, layer in enumerate(self._form.layers) if layer in own]

    def of(self, batch: MicroBatch, indices: Tensor | None) -> Replay:
        """Return the replay of a micro-batch, for all passes over it.

        indices: [part] this context-parallel rank's tokens, of which those behind the micro-batch are padding; None:
            all tokens.
        """
        if not self._rollout:
            return FirstChoices(self._form.chosen, self._tally)
        choices = batch.choices or PackedChoices.none(len(batch.tokens), self._form)  # of an empty micro-batch
        if indices is not None:
            choices = choices.at(indices)
        device, parallel = self._policy.device, self._policy.config.sequence_parallel
        return GivenChoices(
            choices.given[:, self._columns].to(device),
            choices.known.to(device),
            {self._form.layers[column]: index for index, column in enumerate(self._columns)},
            self._tally,
            self._policy.pg_collection.tp.rank() if parallel else 0,
        )

    def stats(self, missing: int) -> RouterStats:
        """missing: tokens without choices of the engine, as far as this rank counts them."""
        replayed, differing = self._tally.counts.double().unbind()
        return RouterStats(replayed, differing, missing)
