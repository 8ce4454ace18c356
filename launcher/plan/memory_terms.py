"""Terms of a GPU's memory, each with its formula in words. Pure.

Activations are counted as in arXiv 2205.05198, for our layers: SwiGLU, grouped queries, no dropout, attention that
never stores its scores. Fused kernels are not assumed; they need less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.parameters import Weights, weights
from launcher.plan.sizes import Sizes
from megatron_rl.recipe.cache_sizes import CacheBytes, cache_bytes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.flops import fullest_microbatch
from megatron_rl.recipe.inference import PAGE_TOKENS, pages_of, without_graphs
from megatron_rl.recipe.layer_sizes import (
    LayerKind,
    convolved,
    feed_forward_widths,
    head_widths,
    layer_kinds,
    prediction_kind,
    replica_layers,
    token_linears,
)
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import LayerType

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
FP32_BYTES = 4
ADAM_BYTES = {"bf16": 12, "fp32": 8}
"""Bytes of optimizer state per parameter: both moments, and fp32 weights unless the model itself is fp32."""
ROUND_BYTES = 2**24
"""Bytes of weights that a rank sends to replicas at once; as in generate/refit/packages.py."""
CHUNK_BYTES = 2**28
"""Bytes of fp32 logits that exist at once; as in algorithms/logprobs.py."""
LOGIT_BYTES = 16
"""Bytes beside each logit if all exist at once: fp32 copy, log-softmax, and two of that size for the entropy."""
CONTEXT = "context"
CONTEXT_BYTES = 3 * 2**30
"""CUDA context and NCCL's buffers: a rule of thumb."""


@dataclass(frozen=True, slots=True)
class Term:
    name: str
    bytes: int
    formula: str


def adam_states(config: RunConfig, sizes: Sizes, held: Weights) -> Term:
    return of_shard(config, sizes, held, "optimizer", ADAM_BYTES[config.model.dtype])


def of_shard(config: RunConfig, sizes: Sizes, held: Weights, name: str, each: int) -> Term:
    """`each` bytes for every parameter that a rank updates."""
    if not config.optimizer.distributed:
        return Term(name, each * held.all, f"{each} bytes x {in_words(held.all)} parameters, not sharded")
    replicas = sizes.dp * sizes.cp
    formula = f"{each} bytes x {in_words(held.dense)} parameters / {replicas} data-parallel ranks"
    if held.experts:
        formula += f" + {each} bytes x {in_words(held.experts)} of experts / {sizes.expert_dp}"
    return Term(name, each * held.dense // replicas + each * held.experts // sizes.expert_dp, formula)


def activations(config: RunConfig, sizes: Sizes, stage: int) -> Term:
    """Activations that the layers of a stage keep for the backward pass. A layer keeps:

    norms          input and normalised input in fp32, and the output. With adapters no normalised input, which only
                   the gradient of the norm's weight needs. Selective: the input as it is, and the output if
                   Transformer Engine computes it
    attention      queries, keys and values (of all context-parallel ranks), its output before and after packing,
                   and its sums in fp32; for norms of queries and keys, input and normalised input in fp32
    feed-forward   first output, activated gate and product. Selective: the first output; of experts all except the
                   activated gate
    adapters       the input times A of each target; the input of its linear is among the above, unless some is dropped

    A prediction layer that is trained keeps a layer's, and those of three norms and of the projection.
    """
    tokens, in_flight = _tokens(config, sizes), sizes.pp - stage
    parts, kept = [], 0
    kinds = layer_kinds(config.model, sizes.stages(config.model)[stage])
    if config.model.trains_prediction and stage == sizes.pp - 1:
        kinds[prediction_kind(config.model)] += 1
        size = WEIGHT_BYTES[config.model.dtype]
        around = (3 * (2 * FP32_BYTES + size) + 2 * size) * config.model.hidden_size
        kept = around // (sizes.tp if sizes.sequence_parallel else 1)
        parts.append(f"{in_words(kept)} bytes around the prediction layer")
    for kind, layers in kinds.items():
        of_kind = kept_bytes(config, sizes, config.training.recompute, kind)
        parts.append(f"{layers} layers x {in_words(of_kind)} bytes")
        kept += layers * of_kind
    formula = f"{in_words(tokens)} tokens x " + (parts[0] if len(parts) == 1 else f"({' + '.join(parts)})")
    if in_flight > 1:
        formula += f" x {in_flight} micro-batches in flight"
    return Term("activations", tokens * kept * in_flight, formula)


def layer_backward(config: RunConfig, sizes: Sizes, layers: range, tied_rows: int) -> Term:
    """Memory that the backward pass of the widest layer of a stage adds: recomputed activations, six gradients of
    feed-forward width and two of model width, of experts four more for each routed token, gathered and sorted, and the
    gradient of a tied embedding, which is kept until the pass reaches its other end.

    Args:
        layers: of the stage.
        tied_rows: rows of the embedding if it is the output layer as well, else 0.
    """
    model, recompute, size = config.model, config.training.recompute, WEIGHT_BYTES[config.model.dtype]

    def added(kind: LayerKind) -> int:
        again = kept_bytes(config, sizes, "none", kind)
        again -= kept_bytes(config, sizes, recompute, kind) * (recompute == "selective")
        width = sum(feed_forward_widths(model, kind.has_experts))
        routed = 4 * (model.experts_per_token or 0) * kind.has_experts * model.hidden_size
        return again * (recompute != "none") + size * (6 * width // sizes.tp + 2 * model.hidden_size + routed)

    tokens, each = _tokens(config, sizes), max(map(added, layer_kinds(model, layers)))
    table = size * tied_rows // sizes.tp * model.hidden_size
    formula = f"{in_words(tokens)} tokens x {in_words(each)} bytes in one layer's backward pass, recompute {recompute}"
    if table:
        formula += f" + {in_words(table)} bytes of the tied table's gradient"
    return Term("backward", tokens * each + table, formula)


def _tokens(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the fullest micro-batch on one rank: of each sequence all but the last."""
    return -(-sum(length - 1 for length in fullest_microbatch(config, sizes.dp)) // sizes.cp)


def _predicted(config: RunConfig, sizes: Sizes) -> int:
    """Tokens of the same micro-batch and rank whose logits are needed: those of answers."""
    most = config.sampling.max_new_tokens
    return -(-sum(min(most, length - 1) for length in fullest_microbatch(config, sizes.dp)) // sizes.cp)


def kept_bytes(config: RunConfig, sizes: Sizes, recompute: str, kind: LayerKind) -> int:
    """Bytes that one layer keeps per token on one rank. If transformer_impl is left open, the larger of both."""
    model, size, tp = config.model, WEIGHT_BYTES[config.model.dtype], sizes.tp
    fused = config.training.transformer_impl != "local" and model.lora is None  # adapters need megatron-core's linears
    split = tp if sizes.sequence_parallel else 1
    if recompute == "full":
        return size * model.hidden_size // split
    selective = recompute == "selective"
    wide = (2 if model.lora is None else 1) * FP32_BYTES
    count = 4 if model.norms == "around" else 2
    norms = count * ((1 + fused) * size if selective else wide + size) * model.hidden_size
    activations, (always, routed) = 3 if selective else 4, feed_forward_widths(model, kind.has_experts)
    feed_forward = (2 if selective else 4) * always // tp
    if kind.has_experts and model.experts_per_token:
        feed_forward += 2 * model.experts_per_token * model.hidden_size + activations * routed // tp
    attention = kept_by_attention(model, sizes, kind.attention, wide)
    return norms // split + attention + size * (feed_forward + _kept_by_adapters(model, sizes, kind))


def kept_by_attention(model: ModelConfig, sizes: Sizes, attention: LayerType, wide: int) -> int:
    """Bytes that the attention of one layer keeps per token on one rank.

    wide: bytes of a number that a norm inside keeps.
    """
    size, tp, cp, heads = WEIGHT_BYTES[model.dtype], sizes.tp, sizes.cp, model.num_attention_heads
    if attention == "linear_attention" and (net := model.delta_net):
        values, channels = net.value_heads * net.value_head_dim, convolved(model)
        # Before and behind the convolution; keys and queries of all value heads, normalised; result, norm and gate.
        repeated = 2 * net.value_heads * net.key_head_dim
        return (size * (2 * channels + repeated + 3 * values) + wide * values + 4 * FP32_BYTES * net.value_heads) // tp
    query, key, value, result = head_widths(model)
    kept = size * (query + cp * (key + value) + (2 + 2 * model.attention_gate) * result) + FP32_BYTES * heads
    kept += model.qk_norm * wide * (query + key)
    if latent := model.latent_attention:
        short = latent.kv_lora_rank + (latent.q_lora_rank or 0)
        return kept // tp + (wide + size) * short + size * latent.qk_rope_head_dim
    return kept // tp


def _kept_by_adapters(model: ModelConfig, sizes: Sizes, kind: LayerKind) -> int:
    """Numbers that the adapters of one layer keep per token: the input times A of each target and, with dropout, which
    inputs are left and their values, for each linear of megatron-core with a target."""
    if (lora := model.lora) is None:
        return 0
    kept = 0
    for linear in token_linears(model, kind):
        targets = linear.targets(lora)
        kept += lora.rank * len(targets)
        if targets and lora.dropout:
            kept += 2 * linear.inputs // (sizes.tp if linear.split == "inputs" else 1)
    return kept


def loss(config: RunConfig, sizes: Sizes, vocab: int) -> Term:
    """Memory of the backward pass of the log-probs: the gradient of the output layer in fp32, unless only adapters are
    trained, and that of one chunk of tokens; the logits of the chunk in fp32, and their gradient; for all tokens the
    output of the last layer, the part of it that predicts, and its gradient; and the activations of the last norm.
    Twice with a prediction layer that is trained. A divergence from a teacher makes its own gradient of the output
    layer."""
    model, size, tokens = config.model, WEIGHT_BYTES[config.model.dtype], _tokens(config, sizes)
    of_weight = FP32_BYTES + size + size * config.teachings.diverge if model.lora is None else 0
    rows, split = vocab // sizes.tp, sizes.tp if sizes.sequence_parallel else 1
    predicted = _predicted(config, sizes)
    whole = predicted * rows * FP32_BYTES
    if model.trains_prediction:
        predicted, tokens = 2 * predicted, 2 * tokens
    if sizes.tp == 1 and whole <= CHUNK_BYTES:
        each = size + LOGIT_BYTES
        formula = f"{in_words(predicted)} predicted tokens x {in_words(rows)} of the vocabulary x {each} bytes"
        return Term("logits", predicted * rows * each, formula)
    table, chunk = of_weight * rows * model.hidden_size, min(CHUNK_BYTES, whole)
    each = 3 * size * model.hidden_size + 2 * FP32_BYTES * model.hidden_size // split
    formula = (
        f"{of_weight} bytes x {in_words(rows)} of the vocabulary x {model.hidden_size} + {FP32_BYTES + size} "
        f"bytes x {in_words(chunk // FP32_BYTES)} logits + {in_words(tokens)} tokens x {in_words(each)} bytes"
    )
    return Term("logits", table + chunk * (FP32_BYTES + size) // FP32_BYTES + tokens * each, formula)


def engine_weights(config: RunConfig, sizes: Sizes, vocab: int, held: Weights) -> Iterator[Term]:
    """Weights that a rank generates with and does not train. If both use the same tp, its trained weights are among
    those that it generates with."""
    size = WEIGHT_BYTES[config.model.dtype]
    needed = weights(config.model.trunk, vocab, sizes.inference_tp).all
    if missing := needed - held.all * (sizes.inference_tp == sizes.tp):
        formula = f"{size} bytes x {in_words(missing)} parameters: another layout"
        yield Term("inference weights", size * missing, formula)


def cached_bytes(config: RunConfig) -> int:
    """Bytes of a number in the cache of keys and values."""
    vllm = config.inference.own_vllm
    return 1 if vllm and vllm.precision.cache else WEIGHT_BYTES[config.model.dtype]


def kv_cache(config: RunConfig, sizes: Sizes) -> Term:
    pages, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    of_token, of_row = cache_sizes(config, sizes)
    rows = config.inference.max_batch
    formula = f"{in_words(of_token)} bytes a token x {in_words(pages)} pages x {in_words(page_tokens)} tokens"
    if of_row:
        formula += f" + {in_words(of_row)} bytes a row x {rows} rows"
    return Term("KV cache", of_token * pages * page_tokens + of_row * rows, formula)


def cache_sizes(config: RunConfig, sizes: Sizes) -> CacheBytes:
    """Bytes that one rank of a replica caches of a token, and of a sequence whatever its length."""
    by_vllm, stages = config.inference.own_vllm is not None, replica_layers(config.model.num_layers, sizes.inference_pp)
    size, longest = cached_bytes(config), config.sequence_length
    found = (cache_bytes(config.model, size, sizes.inference_tp, longest, by_vllm, layers) for layers in stages)
    return max(found, key=lambda held: held.token * longest + held.sequence)


def decode_graphs(config: RunConfig, vocab: int) -> Iterator[Term]:
    """Memory that CUDA graphs of decode steps keep: all that the largest of them computes. Per logit, that is the
    logit, two copies in fp32, and probabilities with their sums in fp64; with top-p also the sorted tokens, with top-k
    or min-p also the remaining probabilities."""
    _, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    without = without_graphs(config.inference)
    if config.job.device == "cpu" or config.model.dtype == "fp32" or page_tokens % PAGE_TOKENS["cuda"] or without:
        return
    sampling, rows = config.sampling, config.inference.max_batch
    each = 40 if sampling.top_p < 1 else 26 if sampling.top_k or sampling.min_p else 22
    formula = f"{rows} rows x {in_words(vocab)} of the vocabulary x {each} bytes"
    yield Term("decode graphs", rows * vocab * each, formula)


def start(config: RunConfig, sizes: Sizes, held: Weights) -> Iterator[Term]:
    """Memory during the start of a rank: an engine with the trainer's tp is built before it shares the trainer's
    weights. Without sequence parallelism it is the trainer's own model from the start."""
    size = WEIGHT_BYTES[config.model.dtype]
    if sizes.inference_tp == sizes.tp and sizes.pp == sizes.ep == 1 and sizes.sequence_parallel:
        formula = f"{size} bytes x {in_words(held.all)} parameters of the engine, until it shares the trainer's"
        yield Term("start", size * held.all, formula)


def packages(config: RunConfig, held: Weights) -> Term:
    """Weights packed for the replicas, of a round of the transfer and of the one before it."""
    size = min(ROUND_BYTES, WEIGHT_BYTES[config.model.dtype] * held.all)
    return Term("packages", 2 * size, f"2 x {in_words(size)} bytes of a round of the transfer")


def prefill(config: RunConfig, sizes: Sizes) -> Term:
    """Memory of `layer_forward` for all prompt tokens that are computed at once."""
    length = config.sequence_length
    prompt = max(1, length - config.sampling.max_new_tokens)
    tokens = min(config.inference.prefill_tokens, length + (config.inference.max_batch - 1) * prompt)
    each = layer_forward(config, sizes)
    return Term("prefill", tokens * each, f"{in_words(tokens)} tokens x {in_words(each)} bytes of one layer")


def layer_forward(config: RunConfig, sizes: Sizes) -> int:
    """Bytes per token at the widest point of one layer, without a backward pass, beside the residual stream and its
    norm: either the feed-forward network (first output, activated gate, product) or a norm (three times in fp32). With
    adapters, the output of the base, that of the adapter and their sum. Experts need three tensors of their routed
    tokens: sorted, their outputs, and back in order; in fp32, where they run one by one, at most eight."""
    model, size, tp = config.model, WEIGHT_BYTES[config.model.dtype], sizes.inference_tp
    widths = 4 if model.lora is None else 6
    dense = max(model.ffn_hidden_size, model.shared_expert_ffn_hidden_size or 0)
    each = max(widths * dense // tp * size, (3 * FP32_BYTES - size) * model.hidden_size)
    if model.experts_per_token:
        each = model.experts_per_token * (3 if model.dtype == "bf16" else 8) * size * model.hidden_size
    beside = 4 if model.experts_per_token or model.lora else 2  # megatron-core's own layers hold more than fused ones
    return each + size * (beside * model.hidden_size + 2 * model.head_size)


def context(config: RunConfig) -> tuple[Term, ...]:
    if config.job.device == "cpu":
        return ()
    return (Term(CONTEXT, CONTEXT_BYTES, "CUDA and NCCL: a rule of thumb"),)


def in_words(number: int) -> str:
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
