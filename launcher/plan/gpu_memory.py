"""Pure: how much GPU memory a rank needs in each phase of its life, and how large a checkpoint is.

Estimates for planning: each term (memory_terms.py) says how it was computed, so that a surprising one can be checked by
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan import memory_terms
from launcher.plan.memory_terms import CONTEXT, FP32_BYTES, WEIGHT_BYTES, Term, in_words
from launcher.plan.parameters import vocabulary, weights, whole_model
from launcher.plan.sizes import Sizes
from megatron_rl.config import RunConfig
from megatron_rl.rank.config import Offload

CHECKPOINT_ADAM_BYTES = 12
"""As on the GPU, with the fp32 weights in any case."""
PROCESS_BYTES = 400 * 10**6
"""Memory of a rank's interpreter with torch and megatron-core, before the first weight."""
LASTING = ("weights", "gradients", "optimizer")
"""Terms that do not depend on the lengths of answers."""
PHASES = ("build", "generate", "train", "update")
"""Of a rank, in their order; to score holds less than to train."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What a rank holds in one part of its life."""

    name: str
    """build, generate, train or update."""
    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)

    @property
    def tensors(self) -> int:
        """Bytes of what torch holds of that."""
        return sum(term.bytes for term in self.terms if term.name != CONTEXT)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a rank of one role needs."""

    role: str
    """colocated, training or inference."""
    stage: int | None
    """Of training's pipeline; None where it only generates."""
    phases: tuple[Phase, ...]
    """Of each name the fullest."""

    @property
    def fullest(self) -> Phase:
        """The phase that its memory has to do for."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        """Bytes of its fullest phase."""
        return self.fullest.total


def rank_memories(config: RunConfig, sizes: Sizes, vocab: int) -> list[Memory]:
    """The memory of the fullest rank of each role that the layout has."""
    fullest = max((_training(config, sizes, vocab, stage) for stage in range(sizes.pp)), key=lambda one: one.total)
    return [fullest, _inference(config, sizes, vocab)] if sizes.partitioned else [fullest]


def rank_memory(config: RunConfig, sizes: Sizes, vocab: int, stage: int | None) -> Memory:
    """The memory of the ranks of one stage of training's pipeline; None: of those that only generate."""
    return _inference(config, sizes, vocab) if stage is None else _training(config, sizes, vocab, stage)


def as_rehearsed(config: RunConfig) -> RunConfig:
    """The recipe with what a rehearsal computes by: there is no Transformer Engine without a GPU."""
    return config.model_copy(update={"training": config.training.model_copy(update={"transformer_impl": "local"})})


def checkpoint_bytes(config: RunConfig, vocab: int) -> int:
    """Bytes of one checkpoint, of all ranks together."""
    return whole_model(config.model, vocab) * (WEIGHT_BYTES[config.model.dtype] + CHECKPOINT_ADAM_BYTES)


def offloaded_bytes(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of Adam's state that the fullest training rank keeps in the host's memory."""
    if config.offload != "optimizer":
        return 0
    held = (weights(config.model, vocab, sizes.tp, sizes.pp, sizes.ep, stage) for stage in range(sizes.pp))
    return max(memory_terms.adam_states(config, sizes, each).bytes for each in held)


def incoming_bytes(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of the host's memory in which a rank of a replica puts new weights aside until all have come."""
    if not sizes.partitioned:
        return 0
    return WEIGHT_BYTES[config.model.dtype] * weights(config.model, vocab, sizes.inference_tp).all


def sent_bytes(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of the host's memory in which all ranks that train together keep what they have sent to replicas."""
    if not sizes.partitioned or config.placement.inference.transfer == "whole":
        return 0
    return sizes.replicas * WEIGHT_BYTES[config.model.dtype] * weights(config.model, vocab).all


def least_host_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Memory that all ranks of a CPU run need at least; 0 on GPUs. Activations and caches are left out: they depend on
    the lengths, and stay far below the estimate where prompts are shared and answers short."""
    if config.job.device != "cpu":
        return 0
    rows = vocabulary(config) or 0
    held = [
        PROCESS_BYTES + max(sum(term.bytes for term in phase.terms if term.name in LASTING) for phase in one.phases)
        for one in rank_memories(config, sizes, rows)
    ]
    counts = [sizes.training_world, sizes.generating] if sizes.partitioned else [sizes.training_world]
    return sum(number * each for number, each in zip(counts, held, strict=True))


def _training(config: RunConfig, sizes: Sizes, vocab: int, stage: int) -> Memory:
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    held = weights(model, vocab, sizes.tp, sizes.pp, sizes.ep, stage)
    parameters = f"{in_words(held.all)} parameters"
    own = Term("weights", size * held.all, f"{size} bytes x {parameters}")
    each = FP32_BYTES if config.optimizer.grad_reduce_in_fp32 else size
    gradients = Term("gradients", each * held.all, f"{each} bytes x {parameters}")
    widened = []
    if each != FP32_BYTES:
        widened.append(memory_terms.of_shard(config, sizes, held, "widened gradients", FP32_BYTES))
    adam, cache = memory_terms.adam_states(config, sizes, held), memory_terms.kv_cache(config, sizes)
    graphs = tuple(memory_terms.decode_graphs(config, vocab))
    models = [own]
    if config.grpo.kl_beta > 0:
        models.append(Term("reference", size * held.all, f"{size} bytes x {parameters}: the weights of the KL penalty"))
    of_choice: dict[Offload, tuple[Term, ...]] = {"none": (gradients, adam), "buffers": (adam,), "optimizer": ()}
    stays = of_choice[config.offload]

    built: list[tuple[Term, ...]] = [(*models, gradients, adam)]
    if config.optimizer.distributed:
        moved = Term("start", own.bytes, f"{own.formula}, until they are in the optimizer's buffer")
        built.append((*models, gradients, moved))
    last = stage == sizes.pp - 1
    of_layer = memory_terms.layer_backward(config, sizes, vocab * (last and model.tied_embeddings))
    of_loss = memory_terms.loss(config, sizes, vocab) if last else of_layer
    train = (
        gradients,
        memory_terms.activations(config, sizes, stage),
        max(of_layer, of_loss, key=lambda term: term.bytes),
    )
    phases: dict[str, list[tuple[Term, ...]]] = {
        "build": built,
        "train": [train],
        "update": [(gradients, adam, *widened)],
    }
    if not sizes.partitioned and config.inference.engine != "server":
        built += [(*models, *stays, engine) for engine in memory_terms.start(config, sizes, held)]
        models += memory_terms.engine_weights(config, sizes, vocab, held)
        phases["generate"] = [(cache, *graphs, memory_terms.prefill(config, sizes))]
        stays = (*stays, cache, *graphs) if config.offload == "none" else stays
    for name in phases.keys() - {"build"}:
        phases[name] = [(*models, *stays, *(term for term in terms if term not in stays)) for terms in phases[name]]
    role = "training" if sizes.partitioned else "colocated"
    return Memory(role, stage, tuple(_fullest(name, config, phases[name]) for name in PHASES if name in phases))


def _inference(config: RunConfig, sizes: Sizes, vocab: int) -> Memory:
    held = weights(config.model, vocab, sizes.inference_tp)
    size = WEIGHT_BYTES[config.model.dtype]
    terms = (
        Term("weights", size * held.all, f"{size} bytes x {in_words(held.all)} parameters"),
        memory_terms.kv_cache(config, sizes),
        *memory_terms.decode_graphs(config, vocab),
        memory_terms.prefill(config, sizes),
    )
    return Memory("inference", None, (_fullest("generate", config, [terms]),))


def _fullest(name: str, config: RunConfig, moments: Sequence[tuple[Term, ...]]) -> Phase:
    """The phase at the moment at which it holds the most."""
    return max(
        (Phase(name, (*terms, *memory_terms.context(config))) for terms in moments), key=lambda phase: phase.total
    )
