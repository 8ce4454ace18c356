"""Estimate of the memory that a rank needs in each phase, and of the size of a checkpoint. Pure.

Each term (memory_terms.py) comes with its formula, so that a surprising one can be checked by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.plan import memory_terms
from launcher.plan.engine_precision import weights_of_engine
from launcher.plan.memory_terms import CONTEXT, WEIGHT_BYTES, Term
from launcher.plan.parameters import generating, trained, vocabulary
from launcher.plan.rank_terms import RankTerms, rank_terms, weights_of_teacher
from launcher.plan.shared_device import VLLM, moments
from launcher.plan.sizes import Sizes
from megatron_rl.contract.paths import TEACHER
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.job import Offload

CHECKPOINT_ADAM_BYTES = 12
"""Bytes of optimizer state per parameter in a checkpoint, which always has fp32 weights."""
PROCESS_BYTES = 400 * 10**6
"""Memory of a rank's interpreter with torch and megatron-core, before the first weight; of a worker of vLLM, too."""
VLLM_BYTES = 1000 * 10**6
"""Memory of the two processes of a vLLM on a CPU that hold no weights: HTTP server and engine (measured, 0.32)."""
LASTING = ("weights", "gradients", "optimizer", f"{VLLM}weights")
PHASES = ("build", "publish", "generate", "train", "update", "send")
"""Phases of a rank. Scoring is left out: it holds less than training. On a device that a vLLM shares they are acts of
`device_turns`."""


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        return sum(term.bytes for term in self.terms)

    @property
    def tensors(self) -> int:
        """Bytes that torch allocates in the rank: all terms except the CUDA context, and what a vLLM on the same device
        holds."""
        return sum(term.bytes for term in self.terms if term.name != CONTEXT and not term.name.startswith(VLLM))


@dataclass(frozen=True, slots=True)
class RankMemory:
    role: str
    """colocated, training, inference or teacher."""
    stage: int | None
    phases: tuple[Phase, ...]
    share: float = 1.0

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        return self.fullest.total

    @property
    def tensors(self) -> int:
        """Most bytes that torch allocates in the rank."""
        return max(phase.tensors for phase in self.phases)

    def beside(self, name: str) -> int:
        """Bytes on the device in a phase that torch does not allocate in the rank: contexts, and what a vLLM holds. A
        phase that is not planned has those of training."""
        phases = {phase.name: phase for phase in self.phases}
        found = phases.get(name) or phases.get("train") or self.fullest
        return found.total - found.tensors


def rank_memories(config: RunConfig, sizes: Sizes, vocab: int) -> list[RankMemory]:
    found = [max((_training(config, sizes, vocab, stage) for stage in range(sizes.pp)), key=lambda one: one.total)]
    if sizes.partitioned:
        found.append(_inference(config, sizes, vocab))
    if TEACHER in sizes.nodes_of_fixed and config.distill and config.distill.parameters:
        found.append(_teacher(config, config.distill.parameters))
    return found


def rank_memory(config: RunConfig, sizes: Sizes, vocab: int, role: str, stage: int | None) -> RankMemory:
    if stage is not None:
        return _training(config, sizes, vocab, stage)
    if role == "inference":
        return _inference(config, sizes, vocab)
    return _teacher(config, (config.distill.parameters if config.distill else None) or 0)


def as_rehearsed(config: RunConfig) -> RunConfig:
    """Return the recipe as a rehearsal runs it: Transformer Engine needs a GPU, so local layers replace it."""
    return config.model_copy(update={"training": config.training.model_copy(update={"transformer_impl": "local"})})


def checkpoint_bytes(config: RunConfig, vocab: int) -> int:
    return trained(config.model, vocab).all * (WEIGHT_BYTES[config.model.dtype] + CHECKPOINT_ADAM_BYTES)


def offloaded_bytes(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of optimizer state that the fullest training rank keeps in host memory."""
    if config.offload != "optimizer":
        return 0
    held = (trained(config.model, vocab, sizes.tp, sizes.ep, layers) for layers in sizes.stages(config.model))
    return max(memory_terms.adam_states(config, sizes, each).bytes for each in held)


def offloaded_weights(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of weights, those of a reference included, that the fullest training rank keeps in host memory while a vLLM
    generates on its device."""
    if config.offload != "optimizer" or not sizes.shares_devices:
        return 0
    held = (rank_terms(config, sizes, vocab, stage) for stage in range(sizes.pp))
    return max(sum(term.bytes for term in (each.weights, *each.reference)) for each in held)


def incoming_bytes(config: RunConfig, sizes: Sizes, vocab: int) -> int:
    """Bytes of host memory in which an inference rank collects new weights until all have arrived."""
    if not sizes.partitioned:
        return 0
    return WEIGHT_BYTES[config.model.dtype] * generating(config.model, vocab, sizes)[0].all


def least_host_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Memory that all ranks of a CPU run need at least; 0 on GPUs. Activations and caches are left out: they depend on
    the lengths, and stay far below the estimate where prompts are shared and answers short."""
    if config.job.device != "cpu":
        return 0
    rows = vocabulary(config) or 0
    lasting = {
        one.role: max(sum(term.bytes for term in phase.terms if term.name in LASTING) for phase in one.phases)
        for one in rank_memories(config, sizes, rows)
    }
    counts = {"training": sizes.training_world, "colocated": sizes.training_world, "inference": sizes.generating}
    counts |= {one.kind: one.nodes * sizes.gpus_per_node for one in sizes.fixed}
    fronts = sizes.replicas * sizes.starts_workers
    fronts += sum(one.replicas(sizes.gpus_per_node) * one.starts_workers for one in sizes.fixed)
    workers = sizes.generating * sizes.shares_devices
    held = sum(counts[role] * (PROCESS_BYTES + each) for role, each in lasting.items())
    return held + workers * PROCESS_BYTES + fronts * (PROCESS_BYTES + VLLM_BYTES)


def _training(config: RunConfig, sizes: Sizes, vocab: int, stage: int) -> RankMemory:
    terms = rank_terms(config, sizes, vocab, stage)
    phases = dict(moments(config, sizes, vocab, terms) if sizes.shares_devices else _alone(config, sizes, vocab, terms))
    role = "training" if sizes.partitioned else "colocated"
    return RankMemory(role, stage, tuple(_fullest(name, config, phases[name]) for name in PHASES if name in phases))


def _alone(config: RunConfig, sizes: Sizes, vocab: int, terms: RankTerms) -> dict[str, list[tuple[Term, ...]]]:
    """Moments of each phase of a rank that has its device to itself."""
    models, gradients, adam = list(terms.models), terms.gradients, terms.optimizer
    cache, graphs = memory_terms.kv_cache(config, sizes), tuple(memory_terms.decode_graphs(config, vocab))
    of_choice: dict[Offload, tuple[Term, ...]] = {"none": (gradients, adam), "buffers": (adam,), "optimizer": ()}
    stays, built = of_choice[config.offload], terms.builds
    phases: dict[str, list[tuple[Term, ...]]] = {
        "build": built,
        "train": [(gradients, *terms.activations)],
        "update": [(gradients, adam, *terms.widened)],
    }
    if config.generates and not sizes.has_replicas:
        built += [(*models, *stays, engine) for engine in memory_terms.start(config, sizes, terms.held)]
        models += memory_terms.engine_weights(config, sizes, vocab, terms.held)
        phases["generate"] = [(cache, *graphs, memory_terms.prefill(config, sizes))]
        stays = (*stays, cache, *graphs) if config.offload == "none" else stays
    if sizes.partitioned and config.generates:
        phases["publish"] = [(gradients, memory_terms.packages(config, terms.held))]
    for name in phases.keys() - {"build"}:
        phases[name] = [(*models, *stays, *(term for term in moment if term not in stays)) for moment in phases[name]]
    return phases


def _inference(config: RunConfig, sizes: Sizes, vocab: int) -> RankMemory:
    terms = (
        weights_of_engine(config, vocab, sizes).term("weights"),
        memory_terms.kv_cache(config, sizes),
        *memory_terms.decode_graphs(config, vocab),
        memory_terms.prefill(config, sizes),
    )
    vllm = config.inference.own_vllm
    share = vllm.gpu_share if vllm else 1.0
    return RankMemory("inference", None, (_fullest("generate", config, [terms]),), share)


def _teacher(config: RunConfig, parameters: int) -> RankMemory:
    assert config.teacher_replicas is not None
    held = weights_of_teacher(config, "weights", parameters, config.teacher_replicas.tp)
    share = config.teacher_vllm.gpu_share if config.teacher_vllm else 1.0
    return RankMemory("teacher", None, (_fullest("score", config, [(held,)]),), share)


def _fullest(name: str, config: RunConfig, moments: Sequence[tuple[Term, ...]]) -> Phase:
    return max(
        (Phase(name, (*terms, *memory_terms.context(config))) for terms in moments), key=lambda phase: phase.total
    )
