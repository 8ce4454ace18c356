"""Pure: how much GPU memory a rank needs and how large a checkpoint is, by formula.

Estimates for planning: each term says how it was computed, so that a surprising one can be checked by hand. What a
layer keeps for its backward pass is counted as in arXiv 2205.05198, for our layers (SwiGLU, grouped queries, no
dropout, attention that never holds the scores, no fused kernels: fusion needs less).
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.plan.sizes import Sizes
from megatron_rl.config import RunConfig
from megatron_rl.model.config import ModelConfig

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
FP32_BYTES = 4
GRADIENT_BYTES = 4
"""Gradients are summed in fp32."""
ADAM_BYTES = {"bf16": 12, "fp32": 8}
"""fp32 weights, first and second moment; the weights are their own where the model is fp32."""
CHECKPOINT_ADAM_BYTES = 12
"""As on the GPU, with the fp32 weights in any case."""
LOGIT_BYTES = 16
"""Beside the logit itself, per logit: fp32 copy, log-softmax, and two of that size for the entropy."""
CONTEXT_BYTES = 3 * 2**30
"""CUDA context and NCCL's buffers: a rule of thumb."""


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a rank's memory."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Memory:
    """What the fullest rank of one role needs."""

    role: str
    """colocated, training or inference."""
    stage: int
    """Its pipeline stage."""
    terms: tuple[Term, ...]

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of parameters that a rank holds."""

    dense: int
    """Shared by all data-parallel ranks."""
    experts: int
    """Those of its experts."""

    @property
    def all(self) -> int:
        """Shared and experts' together."""
        return self.dense + self.experts


def vocabulary(config: RunConfig) -> int | None:
    """Rows of the embedding, padding included; None where only the tokenizer knows."""
    model, tokenizer = config.model, config.tokenizer
    tokens = model.vocab_size or (len(tokenizer.alphabet) + 2 if tokenizer.type == "characters" else None)
    return None if tokens is None else model.padded_vocab_size(tokens)


def answers_per_update(config: RunConfig, dp: int) -> int:
    """The most that one data-parallel replica has in one optimizer step."""
    grpo = config.grpo
    prompts = -(-grpo.prompts_per_step // dp)
    return -(-prompts * grpo.group_size // grpo.updates_per_pass)


def weights(model: ModelConfig, vocab: int, tp: int = 1, pp: int = 1, ep: int = 1, stage: int = 0) -> Weights:
    """Parameters of one rank; of the whole model where all sizes are 1.

    Args:
        vocab: rows of the embedding, padding included.
        stage: pipeline stage of the rank.
    """
    hidden, heads, groups, head = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size
    qkv = (heads + 2 * groups) * head
    layer = (hidden * qkv + heads * head * hidden) // tp + 2 * hidden
    layer += qkv // tp * model.qkv_bias + 2 * head * model.qk_norm
    experts = 0
    if model.num_experts:
        layer += hidden * model.num_experts
        experts = model.num_experts // ep * 3 * hidden * (model.expert_ffn_hidden_size or 0) // tp
    else:
        layer += 3 * hidden * model.ffn_hidden_size // tp
    layers = model.num_layers // pp
    table = vocab // tp * hidden
    first, last = stage == 0, stage == pp - 1
    ends = table * first + last * hidden
    if last and not (model.tied_embeddings and first):  # a shared table is there once on each of the two stages
        ends += table
    return Weights(dense=layers * layer + ends, experts=layers * experts)


def whole_model(model: ModelConfig, vocab: int) -> int:
    """Parameters of the model."""
    return weights(model, vocab).all


def rank_memories(config: RunConfig, sizes: Sizes, vocab: int) -> list[Memory]:
    """The memory of the fullest rank of each role that the layout has."""
    found = [max((_training(config, sizes, vocab, stage) for stage in range(sizes.pp)), key=lambda one: one.total)]
    if sizes.partitioned:
        stages = (_inference(config, sizes, vocab, stage) for stage in range(sizes.inference_pp))
        found.append(max(stages, key=lambda one: one.total))
    return found


def checkpoint_bytes(config: RunConfig, vocab: int) -> int:
    """Bytes of one checkpoint, of all ranks together."""
    return whole_model(config.model, vocab) * (WEIGHT_BYTES[config.model.dtype] + CHECKPOINT_ADAM_BYTES)


def _training(config: RunConfig, sizes: Sizes, vocab: int, stage: int) -> Memory:
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    held = weights(model, vocab, sizes.tp, sizes.pp, sizes.ep, stage)
    parameters = f"{_count(held.all)} parameters"
    terms = [
        Term("weights", size * held.all, f"{size} bytes x {parameters}"),
        Term("gradients", GRADIENT_BYTES * held.all, f"{GRADIENT_BYTES} bytes x {parameters}"),
        _adam(config, sizes, held),
    ]
    if config.grpo.kl_beta > 0:
        terms.append(Term("reference", size * held.all, f"{size} bytes x {parameters}: the weights of the KL penalty"))
    terms.append(_activations(config, sizes, stage))
    if stage == sizes.pp - 1:
        terms.append(_logits(config, sizes, vocab))
    if not sizes.partitioned:
        if (sizes.inference_tp, sizes.inference_pp) != (sizes.tp, sizes.pp):
            terms.append(_copy(config, sizes, vocab))
        terms.append(_cache(config, sizes))
    return Memory("training" if sizes.partitioned else "colocated", stage, (*terms, *_context(config)))


def _inference(config: RunConfig, sizes: Sizes, vocab: int, stage: int) -> Memory:
    held = weights(config.model, vocab, sizes.inference_tp, sizes.inference_pp, 1, stage)
    size = WEIGHT_BYTES[config.model.dtype]
    terms = (
        Term("weights", size * held.all, f"{size} bytes x {_count(held.all)} parameters"),
        _cache(config, sizes),
        _prefill(config, sizes),
    )
    return Memory("inference", stage, (*terms, *_context(config)))


def _adam(config: RunConfig, sizes: Sizes, held: Weights) -> Term:
    each = ADAM_BYTES[config.model.dtype]
    if not config.optimizer.distributed:
        return Term("optimizer", each * held.all, f"{each} bytes x {_count(held.all)} parameters, not sharded")
    replicas = sizes.dp * sizes.cp
    formula = f"{each} bytes x {_count(held.dense)} parameters / {replicas} data-parallel ranks"
    if held.experts:
        formula += f" + {each} bytes x {_count(held.experts)} of experts / {sizes.expert_dp}"
    return Term("optimizer", each * held.dense // replicas + each * held.experts // sizes.expert_dp, formula)


def _activations(config: RunConfig, sizes: Sizes, stage: int) -> Term:
    """A layer keeps of its two norms the input and what is normalised, both in fp32, and the output; queries, keys and
    values, what attention makes of them before and after it is packed again, and its sums, in fp32; of the feed-forward
    network its first output, the activated gate and the product. `selective` keeps of the norms input and output, as
    they are, and not the activated gate."""
    model, recompute = config.model, config.training.recompute
    tokens = _tokens(config, sizes)
    kept = _kept(model, sizes, recompute)
    layers, in_flight = model.num_layers // sizes.pp, sizes.pp - stage
    whole = f"{_count(tokens)} tokens x {layers} layers x {_count(kept)} bytes"
    total = tokens * layers * kept * in_flight
    if in_flight > 1:
        whole += f" x {in_flight} micro-batches under way"
    if recompute != "none":
        total += tokens * (again := _kept(model, sizes, "none") - kept * (recompute == "selective"))
        whole += f" + {_count(again)} bytes a token of the layer being recomputed ({recompute})"
    return Term("activations", total, whole)


def _tokens(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the largest micro-batch on one rank: a sequence that alone has more than fits makes its own."""
    longest = config.sequence_length
    most = min(config.training.tokens_per_microbatch, answers_per_update(config, sizes.dp) * longest)
    return -(-max(most, longest) // sizes.cp)


def _kept(model: ModelConfig, sizes: Sizes, recompute: str) -> int:
    """Bytes that one layer keeps of one token on one rank."""
    size, split = WEIGHT_BYTES[model.dtype], sizes.tp if sizes.sequence_parallel else 1
    if recompute == "full":
        return size * model.hidden_size // split
    selective = recompute == "selective"
    norms = 2 * (2 * size if selective else 2 * FP32_BYTES + size) * model.hidden_size
    heads, groups, head = model.num_attention_heads, model.num_query_groups, model.head_size
    attention = size * (3 * heads + 2 * groups) * head + FP32_BYTES * heads
    activations = 3 if selective else 4
    if model.num_experts and model.experts_per_token and model.expert_ffn_hidden_size:
        routed = model.experts_per_token
        feed_forward = routed * (2 * model.hidden_size + activations * model.expert_ffn_hidden_size // sizes.tp)
    else:
        feed_forward = activations * model.ffn_hidden_size // sizes.tp
    return norms // split + attention // sizes.tp + size * feed_forward


def _logits(config: RunConfig, sizes: Sizes, vocab: int) -> Term:
    tokens, each = _tokens(config, sizes), WEIGHT_BYTES[config.model.dtype] + LOGIT_BYTES
    rows = vocab // sizes.tp
    return Term(
        "logits", tokens * rows * each, f"{_count(tokens)} tokens x {_count(rows)} of the vocabulary x {each} bytes"
    )


def _copy(config: RunConfig, sizes: Sizes, vocab: int) -> Term:
    size = WEIGHT_BYTES[config.model.dtype]
    held = weights(config.model, vocab, sizes.inference_tp, sizes.inference_pp)
    return Term("inference weights", size * held.all, f"{size} bytes x {_count(held.all)} parameters: another layout")


def _cache(config: RunConfig, sizes: Sizes) -> Term:
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    layers, heads = model.num_layers // sizes.inference_pp, -(-model.num_query_groups // sizes.inference_tp)
    rows = config.inference.max_batch
    length = config.sequence_length
    return Term(
        "KV cache",
        2 * size * layers * rows * length * heads * model.head_size,
        f"2 x {size} bytes x {layers} layers x {rows} sequences x {_count(length)} tokens x {heads} heads x "
        f"{model.head_size}",
    )


def _prefill(config: RunConfig, sizes: Sizes) -> Term:
    """The widest point of a layer; nothing is kept for a backward pass."""
    model, size, tokens = config.model, WEIGHT_BYTES[config.model.dtype], config.inference.prefill_tokens
    width = 2 * model.hidden_size + 4 * model.ffn_hidden_size // sizes.inference_tp
    return Term(
        "prefill", tokens * width * size, f"{_count(tokens)} tokens x {_count(size * width)} bytes of one layer"
    )


def _context(config: RunConfig) -> tuple[Term, ...]:
    if config.job.device == "cpu":
        return ()
    return (Term("context", CONTEXT_BYTES, "CUDA and NCCL: a rule of thumb"),)


def _count(number: int) -> str:
    """4.1 billion, 12.3 million, 16,384."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
