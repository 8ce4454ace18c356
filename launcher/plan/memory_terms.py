"""Pure: the terms of a GPU's memory, each a formula with its numbers in words.

What a layer keeps for its backward pass is counted as in arXiv 2205.05198, for our layers (SwiGLU, grouped queries, no
dropout, attention that never holds the scores, no fused kernels: fusion needs less).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.plan.parameters import Weights, weights
from launcher.plan.sizes import Sizes
from megatron_rl.config import RunConfig
from megatron_rl.inference.config import PAGE_TOKENS, pages_of, without_graphs

WEIGHT_BYTES = {"bf16": 2, "fp32": 4}
FP32_BYTES = 4
ADAM_BYTES = {"bf16": 12, "fp32": 8}
"""fp32 weights, first and second moment; the weights are their own where the model is fp32."""
CHUNK_BYTES = 2**28
"""Of the logits in fp32 that exist at once; as in algorithms/logprobs.py."""
LOGIT_BYTES = 16
"""Where all logits exist at once, beside each: fp32 copy, log-softmax, and two of that size for the entropy."""
CONTEXT = "context"
CONTEXT_BYTES = 3 * 2**30
"""CUDA context and NCCL's buffers: a rule of thumb."""


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a rank's memory."""

    name: str
    bytes: int
    formula: str


def adam_states(config: RunConfig, sizes: Sizes, held: Weights) -> Term:
    """Adam's state of the weights that a rank updates."""
    return of_shard(config, sizes, held, "optimizer", ADAM_BYTES[config.model.dtype])


def of_shard(config: RunConfig, sizes: Sizes, held: Weights, name: str, each: int) -> Term:
    """So many bytes for each parameter that a rank updates."""
    if not config.optimizer.distributed:
        return Term(name, each * held.all, f"{each} bytes x {in_words(held.all)} parameters, not sharded")
    replicas = sizes.dp * sizes.cp
    formula = f"{each} bytes x {in_words(held.dense)} parameters / {replicas} data-parallel ranks"
    if held.experts:
        formula += f" + {each} bytes x {in_words(held.experts)} of experts / {sizes.expert_dp}"
    return Term(name, each * held.dense // replicas + each * held.experts // sizes.expert_dp, formula)


def activations(config: RunConfig, sizes: Sizes, stage: int) -> Term:
    """A layer keeps of its two norms the input and what is normalised, both in fp32, and the output; queries, and keys
    and values of all context-parallel ranks, what attention makes of them before and, where branches were gathered,
    after it is packed again, and its sums, in fp32; of norms of queries and keys the input and what is normalised, in
    fp32; of the feed-forward network its first output, the activated gate and the product. `selective` keeps of the two
    norms the input, as it is, and the output where Transformer Engine computes them; of the feed-forward network the
    first output; of experts all but the activated gate."""
    tokens = _tokens(config, sizes)
    kept = kept_bytes(config, sizes, config.training.recompute)
    layers, in_flight = config.model.num_layers // sizes.pp, sizes.pp - stage
    formula = f"{in_words(tokens)} tokens x {layers} layers x {in_words(kept)} bytes"
    if in_flight > 1:
        formula += f" x {in_flight} micro-batches under way"
    return Term("activations", tokens * layers * kept * in_flight, formula)


def layer_backward(config: RunConfig, sizes: Sizes, tied_rows: int) -> Term:
    """What the backward pass of one layer adds: what it keeps and did not, computed again, six gradients in the width
    of the feed-forward network and two in that of the model. A tied table's gradient waits for its other end.

    tied_rows: of the embedding, where it is the output layer as well.
    """
    model, recompute, size = config.model, config.training.recompute, WEIGHT_BYTES[config.model.dtype]
    tokens = _tokens(config, sizes)
    again = kept_bytes(config, sizes, "none") - kept_bytes(config, sizes, recompute) * (recompute == "selective")
    width, choices = model.ffn_hidden_size, 1
    if model.experts_per_token and model.expert_ffn_hidden_size:
        width, choices = model.expert_ffn_hidden_size, model.experts_per_token
    each = again * (recompute != "none") + size * (6 * choices * width // sizes.tp + 2 * model.hidden_size)
    table = size * tied_rows // sizes.tp * model.hidden_size
    formula = f"{in_words(tokens)} tokens x {in_words(each)} bytes in one layer's backward pass, recompute {recompute}"
    if table:
        formula += f" + {in_words(table)} bytes of the tied table's gradient"
    return Term("backward", tokens * each + table, formula)


def _tokens(config: RunConfig, sizes: Sizes) -> int:
    """Tokens that one rank has of the largest micro-batch: a sequence that alone has more than fits makes its own."""
    longest = config.sequence_length
    most = min(sizes.cp * config.training.tokens_per_microbatch, config.grpo.answers_of_replica(sizes.dp) * longest)
    return -(-max(most, longest) // sizes.cp)


def kept_bytes(config: RunConfig, sizes: Sizes, recompute: str) -> int:
    """Bytes that one layer keeps of one token on one rank. Where the ranks choose what computes it, the larger."""
    model, fused = config.model, config.training.transformer_impl != "local"
    size, split = WEIGHT_BYTES[model.dtype], sizes.tp if sizes.sequence_parallel else 1
    if recompute == "full":
        return size * model.hidden_size // split
    selective = recompute == "selective"
    norms = 2 * ((1 + fused) * size if selective else 2 * FP32_BYTES + size) * model.hidden_size
    heads, groups, head = model.num_attention_heads, model.num_query_groups, model.head_size
    attention = size * (3 * heads + 2 * groups * sizes.cp) * head + FP32_BYTES * heads
    attention += model.qk_norm * 2 * FP32_BYTES * (heads + groups) * head
    if model.num_experts and model.experts_per_token and model.expert_ffn_hidden_size:
        routed = model.experts_per_token
        activations = 3 if selective else 4
        feed_forward = routed * (2 * model.hidden_size + activations * model.expert_ffn_hidden_size // sizes.tp)
    else:
        feed_forward = (2 if selective else 4) * model.ffn_hidden_size // sizes.tp
    return norms // split + attention // sizes.tp + size * feed_forward


def loss(config: RunConfig, sizes: Sizes, vocab: int) -> Term:
    """The backward pass of the log-probs: the output layer's gradient in fp32 and that of one chunk of tokens, the
    chunk's logits in fp32 and, rounded, their gradient; of all tokens the last layer's output, what of it predicts and
    its gradient; and what the last norm keeps."""
    model, size, tokens = config.model, WEIGHT_BYTES[config.model.dtype], _tokens(config, sizes)
    rows, split = vocab // sizes.tp, sizes.tp if sizes.sequence_parallel else 1
    whole = tokens * rows * FP32_BYTES
    if sizes.tp == 1 and whole <= CHUNK_BYTES:
        each = size + LOGIT_BYTES
        formula = f"{in_words(tokens)} tokens x {in_words(rows)} of the vocabulary x {each} bytes"
        return Term("logits", tokens * rows * each, formula)
    table, chunk = (FP32_BYTES + size) * rows * model.hidden_size, min(CHUNK_BYTES, whole)
    each = 3 * size * model.hidden_size + 2 * FP32_BYTES * model.hidden_size // split
    formula = (
        f"{FP32_BYTES + size} bytes x {in_words(rows)} of the vocabulary x {model.hidden_size} + {FP32_BYTES + size} "
        f"bytes x {in_words(chunk // FP32_BYTES)} logits + {in_words(tokens)} tokens x {in_words(each)} bytes"
    )
    return Term("logits", table + chunk * (FP32_BYTES + size) // FP32_BYTES + tokens * each, formula)


def engine_weights(config: RunConfig, sizes: Sizes, vocab: int, held: Weights) -> Iterator[Term]:
    """What a rank generates by and does not train: cut alike, all that it trains is among what it generates by."""
    size = WEIGHT_BYTES[config.model.dtype]
    needed = weights(config.model, vocab, sizes.inference_tp).all
    if missing := needed - held.all * (sizes.inference_tp == sizes.tp):
        formula = f"{size} bytes x {in_words(missing)} parameters: another layout"
        yield Term("inference weights", size * missing, formula)


def kv_cache(config: RunConfig, sizes: Sizes) -> Term:
    """Keys and values of all sequences that a rank generates at once."""
    model, size = config.model, WEIGHT_BYTES[config.model.dtype]
    layers, heads = model.num_layers, -(-model.num_query_groups // sizes.inference_tp)
    pages, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    return Term(
        "KV cache",
        2 * size * layers * pages * page_tokens * heads * model.head_size,
        f"2 x {size} bytes x {layers} layers x {in_words(pages)} pages x {in_words(page_tokens)} tokens x "
        f"{heads} heads x {model.head_size}",
    )


def decode_graphs(config: RunConfig, vocab: int) -> Iterator[Term]:
    """What recorded decode steps keep for themselves, where they are recorded: of the largest, all that it makes. That
    is of each logit what it was computed in, two copies in fp32, probabilities and their sums in fp64; with top-p all
    tokens in order beside them, with top-k or min-p the probabilities that are left."""
    _, page_tokens = pages_of(config.inference, config.page_tokens, config.sequence_length)
    without = without_graphs(config.inference, config.model, fp8=config.training.fp8 != "none")
    if config.job.device == "cpu" or config.model.dtype == "fp32" or page_tokens % PAGE_TOKENS["cuda"] or without:
        return
    sampling, rows = config.sampling, config.inference.max_batch
    each = 40 if sampling.top_p < 1 else 26 if sampling.top_k or sampling.min_p else 22
    formula = f"{rows} rows x {in_words(vocab)} of the vocabulary x {each} bytes"
    yield Term("decode graphs", rows * vocab * each, formula)


def start(config: RunConfig, sizes: Sizes, held: Weights) -> Iterator[Term]:
    """While a rank starts: an engine that is cut alike is built before it is given the trainer's weights. Where nothing
    else is cut it is the trainer's own model from the beginning."""
    size = WEIGHT_BYTES[config.model.dtype]
    if sizes.inference_tp == sizes.tp and sizes.pp == sizes.ep == 1 and sizes.sequence_parallel:
        formula = f"{size} bytes x {in_words(held.all)} parameters of the engine, until it shares the trainer's"
        yield Term("start", size * held.all, formula)


def prefill(config: RunConfig, sizes: Sizes) -> Term:
    """The widest point of a layer; nothing is kept for a backward pass. Either the feed-forward network, with its first
    output, the activated gate and the product, or a norm, three times in fp32. Of experts at most eight tensors of the
    tokens that are routed to them: sorted once and twice, what is made of them, back in order, and in fp32."""
    model, size, tp = config.model, WEIGHT_BYTES[config.model.dtype], sizes.inference_tp
    length = config.sequence_length
    prompt = max(1, length - config.sampling.max_new_tokens)
    tokens = min(config.inference.prefill_tokens, length + (config.inference.max_batch - 1) * prompt)
    each = max(4 * model.ffn_hidden_size // tp * size, (3 * FP32_BYTES - 3 * size) * model.hidden_size)
    if model.experts_per_token:
        each = model.experts_per_token * 8 * size * model.hidden_size
    each += 4 * size * model.hidden_size
    return Term("prefill", tokens * each, f"{in_words(tokens)} tokens x {in_words(each)} bytes of one layer")


def context(config: RunConfig) -> tuple[Term, ...]:
    """What is taken before the first tensor; nothing on a CPU."""
    if config.job.device == "cpu":
        return ()
    return (Term(CONTEXT, CONTEXT_BYTES, "CUDA and NCCL: a rule of thumb"),)


def in_words(number: int) -> str:
    """4.1 billion, 12.3 million, 16,384."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
