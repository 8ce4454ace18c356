"""Pure: the Hugging Face tensors in each tensor of megatron-core, and their positions in it.

    linear_qkv [(heads + 2 groups) head, hidden]    for each query group: its queries, its key, its value
    linear_fc1 [2 ffn, hidden]                      gate, then up; the same on every tensor-parallel rank
    word_embeddings, output_layer [padded, hidden]  the vocabulary, then rows without a token
    all others                                      unchanged

The supported architectures (recipe/hf_config.py) all use the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.recipe.model import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    sources: tuple[HfTensor, ...]  # tensors, one after another along the first axis
    split: int | None = None  # axis of each source that tensor-parallel ranks split; None if each has all
    blocks: int | None = None
    """Number of blocks, each with equal parts of all sources, that replace the simple order. Ranks split the rows of
    all blocks."""
    padded: bool = False  # whether rows of zeros may follow


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of one source within one tensor of megatron-core."""

    source: HfTensor
    index: tuple[slice, ...]
    view: Tensor  # view of the same part in the tensor: [blocks, rows, ...].


def weights(model: ModelConfig) -> dict[str, Weight]:
    """Return all weights by megatron-core's names, with layers and experts numbered over the whole model."""
    hidden = model.hidden_size
    assert model.vocab_size is not None  # always in config.json
    table = (model.vocab_size, hidden)
    tied = model.tied_embeddings
    found = {
        EMBEDDING: Weight((HfTensor(HF_EMBEDDING, table),), split=0, padded=True),
        "decoder.final_layernorm.weight": Weight((HfTensor("model.norm.weight", (hidden,)),)),
        # If it is tied, only the last of several pipeline stages of megatron-core has it.
        OUTPUT: Weight((HfTensor(HF_EMBEDDING if tied else HF_OUTPUT, table),), split=0, padded=True),
    }
    for number in range(model.num_layers):
        found |= layer_weights(model, number)
    return found


def layer_weights(model: ModelConfig, number: int) -> dict[str, Weight]:
    """Return the weights of a layer by megatron-core's names, with experts numbered over the whole model."""
    hidden, heads, groups, head = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size
    found: dict[str, Weight] = {}
    ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    sizes = {"q": heads * head, "k": groups * head, "v": groups * head}
    for kind, width in [("weight", (hidden,)), *([("bias", ())] if model.qkv_bias else [])]:
        qkv = tuple(HfTensor(f"{their_attention}.{x}_proj.{kind}", (rows, *width)) for x, rows in sizes.items())
        found[f"{attention}.linear_qkv.{kind}"] = Weight(qkv, split=0, blocks=groups)
    for x in ("q", "k") if model.qk_norm else ():
        norm = HfTensor(f"{their_attention}.{x}_norm.weight", (head,))
        found[f"{attention}.{x}_layernorm.weight"] = Weight((norm,))
    out = HfTensor(f"{their_attention}.o_proj.weight", (hidden, heads * head))
    found[f"{attention}.linear_proj.weight"] = Weight((out,), split=1)
    for norm_name, their_norm in _NORMS.items():
        found[f"{ours}.{norm_name}.weight"] = Weight((HfTensor(f"{theirs}.{their_norm}.weight", (hidden,)),))
    if model.num_experts is None:
        return found | _feed_forward(f"{ours}.mlp", f"{theirs}.mlp", hidden, model.ffn_hidden_size)
    router = HfTensor(f"{theirs}.mlp.gate.weight", (model.num_experts, hidden))
    found[f"{ours}.mlp.router.weight"] = Weight((router,))
    assert model.expert_ffn_hidden_size is not None  # ModelConfig._experts_fit
    for expert in range(model.num_experts):
        our_expert, their_expert = f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}"
        found |= _feed_forward(our_expert, their_expert, hidden, model.expert_ffn_hidden_size)
    return found


_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def _feed_forward(ours: str, theirs: str, hidden: int, ffn: int) -> dict[str, Weight]:
    gate_and_up = tuple(HfTensor(f"{theirs}.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
    return {
        f"{ours}.linear_fc1.weight": Weight(gate_and_up, split=0),
        f"{ours}.linear_fc2.weight": Weight((HfTensor(f"{theirs}.down_proj.weight", (hidden, ffn)),), split=1),
    }


def sources(found: dict[str, Weight]) -> dict[str, HfTensor]:
    return {source.name: source for weight in found.values() for source in weight.sources}


def pieces(weight: Weight, tensor: Tensor, rank: int = 0, size: int = 1) -> Iterator[TensorPiece]:
    """Locate the sources of `weight` in the tensor that tensor-parallel rank `rank` of `size` has of it."""
    if weight.split is None:
        rank, size = 0, 1
    if weight.padded:
        (source,) = weight.sources
        first = min(rank * len(tensor), source.shape[0])
        last = min(first + len(tensor), source.shape[0])
        yield TensorPiece(source, (slice(first, last),), tensor[None, : last - first])
        return
    if weight.blocks is not None and weight.blocks % size:
        yield from _part_of_a_block(weight, weight.blocks, tensor, rank)
        return
    # Example: linear_qkv of 8 query heads in 4 groups, each head of size 2, on rank 1 of 2. The tensor has 16 rows in 2
    # blocks (groups 2 and 3), each with 4 rows of q, 2 of k and 2 of v. The rank's share of q_proj is rows 8..15, which
    # are consecutive there but not here, so the view is [2 blocks, 4 rows, hidden] and copies in the order of blocks.
    blocks = 1 if weight.blocks is None else weight.blocks // size
    shares = [source.shape[weight.split or 0] // size for source in weight.sources]
    index = [(slice(None),) * (weight.split or 0) + (slice(rank * share, (rank + 1) * share),) for share in shares]
    rows = [source.shape[0] // (size if weight.split == 0 else 1) // blocks for source in weight.sources]
    views = tensor.view(blocks, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    yield from map(TensorPiece, weight.sources, index, views)


def _part_of_a_block(weight: Weight, blocks: int, tensor: Tensor, rank: int) -> Iterator[TensorPiece]:
    """Locate them if there are more ranks than key/value heads: each rank has some rows of one block."""
    rows = [source.shape[0] // blocks for source in weight.sources]
    block, first = divmod(rank * len(tensor), sum(rows))
    begin = 0
    for source, length in zip(weight.sources, rows, strict=True):
        low, high = max(first, begin), min(first + len(tensor), begin + length)
        if low < high:
            start = block * length + low - begin
            yield TensorPiece(source, (slice(start, start + high - low),), tensor[None, low - first : high - first])
        begin += length
