"""Memory terms of a rank that trains, by what they are for. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan import memory_terms
from launcher.plan.memory_terms import FP32_BYTES, WEIGHT_BYTES, Term, in_words
from launcher.plan.parameters import Weights, trained, weights
from launcher.plan.replayed_choices import choices_on_device
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.config import RunConfig


@dataclass(frozen=True, slots=True)
class RankTerms:
    held: Weights
    """Parameters of the rank."""
    weights: Term
    gradients: Term
    optimizer: Term
    widened: tuple[Term, ...]
    """Terms that only an update has."""
    activations: tuple[Term, ...]
    """Terms of forward and backward passes."""
    reference: tuple[Term, ...]
    teacher: tuple[Term, ...]
    moved: tuple[Term, ...]
    """Copy of the weights while the optimizer is built."""
    first_step: Term
    """Gradient with which Adam makes its state."""

    @property
    def models(self) -> tuple[Term, ...]:
        return (self.weights, *self.reference, *self.teacher)

    @property
    def builds(self) -> list[tuple[Term, ...]]:
        """Two moments of the build: at its end, and while weights move into the optimizer's buffer."""
        moments = [(*self.models, self.gradients, self.optimizer, self.first_step)]
        return [*moments, (*self.models, self.gradients, *self.moved)] if self.moved else moments


def rank_terms(config: RunConfig, sizes: Sizes, vocab: int, stage: int) -> RankTerms:
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    layers = sizes.stages(model)[stage]
    held = weights(model, vocab, sizes.tp, sizes.ep, layers)
    updated = trained(model, vocab, sizes.tp, sizes.ep, layers)
    each = FP32_BYTES if config.optimizer.grad_reduce_in_fp32 else size
    widened = memory_terms.of_shard(config, sizes, updated, "widened gradients", FP32_BYTES)
    formula = f"{size} bytes x {in_words(updated.all)} parameters, until they are in the optimizer's buffer"
    moved = Term("start", size * updated.all, formula)
    last = stage == sizes.pp - 1
    tied = vocab * (last and model.tied_embeddings and not model.lora)
    of_layer = memory_terms.layer_backward(config, sizes, layers, tied)
    of_loss = memory_terms.loss(config, sizes, vocab) if last else of_layer
    fullest = max(of_layer, of_loss, key=lambda term: term.bytes)
    choices = tuple(choices_on_device(config, sizes, layers))
    return RankTerms(
        held,
        Term("weights", size * held.all, f"{size} bytes x {in_words(held.all)} parameters"),
        Term("gradients", each * updated.all, f"{each} bytes x {in_words(updated.all)} trained parameters"),
        memory_terms.adam_states(config, sizes, updated),
        (*((widened,) if each != FP32_BYTES else ()), *choices),
        (memory_terms.activations(config, sizes, stage), fullest, *choices),
        tuple(_reference(config, weights(model.trunk, vocab, sizes.tp, sizes.ep, layers))),
        tuple(_teacher(config, sizes)),
        (moved,) if config.optimizer.distributed else (),
        _first_step(config, sizes, vocab, updated),
    )


def _first_step(config: RunConfig, sizes: Sizes, vocab: int, updated: Weights) -> Term:
    model = config.model
    shard = updated.all // (sizes.dp * sizes.cp if config.optimizer.distributed else 1)
    largest = min(shard, max(vocab, 2 * model.ffn_hidden_size) * model.hidden_size // sizes.tp)
    return Term("first step", FP32_BYTES * largest, f"{FP32_BYTES} bytes x {in_words(largest)} of the largest weight")


def _reference(config: RunConfig, held: Weights) -> Iterator[Term]:
    size = WEIGHT_BYTES[config.model.dtype]
    if config.algorithms.penalise_kl and config.model.lora is None:  # the base of adapters is their reference
        formula = f"{size} bytes x {in_words(held.all)} parameters: the weights of the KL penalty"
        yield Term("reference", size * held.all, formula)


def _teacher(config: RunConfig, sizes: Sizes) -> Iterator[Term]:
    for distill in config.teachings.held:
        if distill.parameters:
            yield weights_of_teacher(config, "teacher", distill.parameters, sizes.tp * sizes.pp)


def weights_of_teacher(config: RunConfig, name: str, parameters: int, parts: int) -> Term:
    size = WEIGHT_BYTES[config.model.dtype]
    formula = f"{size} bytes x {in_words(parameters)} parameters / {parts} ranks: distill.teacher"
    return Term(name, size * parameters // parts, formula)
