"""Memory of a device that a training rank and a worker of vLLM share, in the stages of a step. Pure.

What is on the device in a stage is said by `megatron_rl/recipe/device_turns.py`; here each of these gets its size. Of
both processes, the CUDA contexts, the communicators and vLLM's recorded graphs stay throughout. Figures of vLLM were
read in the sources of 0.32 or are rules of thumb; none was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.plan import memory_terms
from launcher.plan.engine_precision import weights_of_engine
from launcher.plan.memory_terms import WEIGHT_BYTES, Term, in_words
from launcher.plan.rank_terms import RankTerms
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_bucket import HALF_BYTES, HALVES, bytes_in_rank, bytes_in_worker
from megatron_rl.recipe.device_turns import Act, Holding, TurnStage, sleeps, stages

CONTEXT_BYTES = 2**30
"""CUDA context of a worker of vLLM, its compiled kernels and the workspaces of products: a rule of thumb."""
COMMUNICATOR_BYTES = 2**30
"""NCCL's buffers of a tensor-parallel worker: a rule of thumb."""
ALL_REDUCE_BYTES = 2 * 64 * 2**20
"""vLLM's own all-reduce: two buffers of up to 64 MiB on H100 (CUSTOM_ALL_REDUCE_MAX_SIZES)."""
GRAPHS_BYTES, GRAPHS_LAYER_BYTES = 2**30, 2**25
"""Recorded graphs of all batch sizes: least, and for each layer; together 1 to 3 GiB, as users of vLLM report."""
LOGIT_BYTES = 14
"""Bytes beside each logit of a decode step: bf16, its copy in fp32, log-probs and probabilities."""

VLLM = "vLLM's "
"""Beginning of the names of vLLM's terms; all others are the ranks'."""
SHOWN: tuple[Act, ...] = ("generate", "train", "update", "send")
"""Acts in which a device is fullest. Each other stage holds a part of what one of these does."""


@dataclass(frozen=True, slots=True)
class VllmTerms:
    weights: Term
    cache: Term
    step: Term
    """Activations of its largest step."""
    loading: Term
    """Memory to receive and load weights."""
    lasting: tuple[Term, ...]
    """Terms that stay while it sleeps."""


def moments(
    config: RunConfig, sizes: Sizes, vocab: int, ranks: RankTerms
) -> Iterator[tuple[str, list[tuple[Term, ...]]]]:
    """Yield each phase of a shared device with the moments in which it may be fullest: the build of the ranks, and the
    acts of SHOWN."""
    vllm = vllm_terms(config, sizes, vocab)
    always = (*ranks.teacher, *vllm.lasting)
    if not sleeps(config.offload):
        always += (max(vllm.step, vllm.loading, key=lambda term: term.bytes),)  # the allocator of its process keeps it
    awake = (vllm.weights, vllm.cache)
    held: Mapping[Holding, tuple[Term, ...]] = {
        "weights": (ranks.weights, *ranks.reference),
        "gradients": (ranks.gradients,),
        "optimizer": (ranks.optimizer,),
        "activations": ranks.activations,
        "bucket": (bucket(config, sizes),),
        "engine weights": (vllm.weights,),
        "KV cache": (vllm.cache,),
    }
    further: Mapping[Act, tuple[Term, ...]] = {
        "generate": (vllm.step,),
        "update": ranks.widened,
        "send": (vllm.loading,),
    }
    there = () if sleeps(config.offload) else awake
    yield "build", [tuple(dict.fromkeys((*moment, *always, *there))) for moment in ranks.builds]
    for stage in stages(config.offload):
        if stage.act in SHOWN:
            yield stage.act, [tuple(dict.fromkeys((*_held(stage, held), *always, *further.get(stage.act, ()))))]


def _held(stage: TurnStage, held: Mapping[Holding, tuple[Term, ...]]) -> Iterator[Term]:
    for holding, terms in held.items():
        if holding in stage.on_device:
            yield from terms


def vllm_terms(config: RunConfig, sizes: Sizes, vocab: int) -> VllmTerms:
    cache = memory_terms.kv_cache(config, sizes)
    return VllmTerms(
        weights_of_engine(config, vocab, sizes).term(f"{VLLM}weights"),
        Term(f"{VLLM}KV cache", cache.bytes, cache.formula),
        _largest_step(config, sizes, vocab),
        _loading(config, vocab),
        tuple(_lasting(config, sizes)) if config.job.device == "cuda" else (),
    )


def bucket(config: RunConfig, sizes: Sizes) -> Term:
    half, alone = HALF_BYTES[config.job.device], sizes.training_world == 1
    formula = f"{HALVES} halves of {in_words(half)} bytes" + ("" if alone else ", and what goes to other ranks at once")
    return Term("bucket", HALVES * half if alone else bytes_in_rank(half), formula)


def _lasting(config: RunConfig, sizes: Sizes) -> Iterator[Term]:
    yield Term(f"{VLLM}context", CONTEXT_BYTES, "CUDA and compiled kernels: a rule of thumb")
    if sizes.inference_tp > 1:
        formula = "NCCL's buffers, a rule of thumb, and vLLM's own all-reduce"
        yield Term(f"{VLLM}communicators", COMMUNICATOR_BYTES + ALL_REDUCE_BYTES, formula)
    if config.inference.cuda_graphs:
        layers = config.model.num_layers
        formula = f"recorded decode steps of {layers} layers: a rule of thumb"
        yield Term(f"{VLLM}graphs", max(GRAPHS_BYTES, layers * GRAPHS_LAYER_BYTES), formula)


def _largest_step(config: RunConfig, sizes: Sizes, vocab: int) -> Term:
    """Peak of vLLM's profile run: the widest point of a layer with all tokens that a step may have, or the logits of
    all rows."""
    tokens = max(config.inference.prefill_tokens, config.sequence_length)
    each, rows = memory_terms.layer_forward(config, sizes), config.inference.max_batch
    of_layer = Term(f"{VLLM}largest step", tokens * each, f"{in_words(tokens)} tokens x {in_words(each)} bytes")
    formula = f"{rows} rows x {in_words(vocab)} of the vocabulary x {LOGIT_BYTES} bytes"
    of_logits = Term(f"{VLLM}largest step", rows * vocab * LOGIT_BYTES, formula)
    return max(of_layer, of_logits, key=lambda term: term.bytes)


def _loading(config: RunConfig, vocab: int) -> Term:
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    rows = [vocab, 2 * model.ffn_hidden_size]
    if model.num_experts:
        rows.append(2 * model.num_experts * (model.expert_ffn_hidden_size or 0))
    largest, half = size * max(rows) * model.hidden_size, HALF_BYTES[config.job.device]
    formula = f"copies of a bucket of 2 x {in_words(half)} bytes, and a weight of {in_words(largest)} three times"
    return Term(f"{VLLM}loading", bytes_in_worker(largest, half), formula)
