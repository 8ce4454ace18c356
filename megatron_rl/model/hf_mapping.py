"""Which tensors of Hugging Face each tensor of megatron-core is made of, and where they lie in it. Pure.

    linear_qkv [(heads + 2 groups) head, hidden]    for each query group: its queries, its key, its value
    linear_fc1 [2 ffn, hidden]                      gate, then up; so on every tensor-parallel rank
    word_embeddings, output_layer [padded, hidden]  the vocabulary, then rows that no token stands behind
    all others                                      as they are

Of the supported architectures (model/hf_config.py) all tensors have the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from megatron_rl.model.config import ModelConfig

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_EMBEDDING = "model.embed_tokens.weight"
HF_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Source:
    """A whole tensor of Hugging Face."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """What a tensor of megatron-core is made of."""

    sources: tuple[Source, ...]
    """One after another along the first axis."""
    split: int | None = None
    """The axis of each source that tensor-parallel ranks share out; None: each has all."""
    blocks: int | None = None
    """The sources come in so many blocks instead, with equal parts of each of them in every one, and ranks share out
    the rows of all blocks."""
    padded: bool = False
    """Whether rows of zeros may follow."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one tensor of megatron-core holds of one source, or some of it."""

    source: Source
    index: tuple[slice, ...]
    """Where in the source."""
    view: Tensor
    """The same in the tensor: [blocks, rows, ...]."""


def weights(model: ModelConfig) -> dict[str, Weight]:
    """By megatron-core's names, with layers and experts counted over the whole model."""
    hidden, heads, groups, head = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size
    assert model.vocab_size is not None  # config.json has it
    table = (model.vocab_size, hidden)
    tied = model.tied_embeddings
    found = {
        EMBEDDING: Weight((Source(HF_EMBEDDING, table),), split=0, padded=True),
        "decoder.final_layernorm.weight": Weight((Source("model.norm.weight", (hidden,)),)),
        # Where it is tied, megatron-core has it on the last of several pipeline stages alone.
        OUTPUT: Weight((Source(HF_EMBEDDING if tied else HF_OUTPUT, table),), split=0, padded=True),
    }
    for number in range(model.num_layers):
        ours, theirs = f"decoder.layers.{number}", f"model.layers.{number}"
        attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
        sizes = {"q": heads * head, "k": groups * head, "v": groups * head}
        for kind, width in [("weight", (hidden,)), *([("bias", ())] if model.qkv_bias else [])]:
            qkv = tuple(Source(f"{their_attention}.{x}_proj.{kind}", (rows, *width)) for x, rows in sizes.items())
            found[f"{attention}.linear_qkv.{kind}"] = Weight(qkv, split=0, blocks=groups)
        for x in ("q", "k") if model.qk_norm else ():
            norm = Source(f"{their_attention}.{x}_norm.weight", (head,))
            found[f"{attention}.{x}_layernorm.weight"] = Weight((norm,))
        out = Source(f"{their_attention}.o_proj.weight", (hidden, heads * head))
        found[f"{attention}.linear_proj.weight"] = Weight((out,), split=1)
        for norm_name, their_norm in _NORMS.items():
            found[f"{ours}.{norm_name}.weight"] = Weight((Source(f"{theirs}.{their_norm}.weight", (hidden,)),))
        if model.num_experts is None:
            found |= _feed_forward(f"{ours}.mlp", f"{theirs}.mlp", hidden, model.ffn_hidden_size)
            continue
        router = Source(f"{theirs}.mlp.gate.weight", (model.num_experts, hidden))
        found[f"{ours}.mlp.router.weight"] = Weight((router,))
        assert model.expert_ffn_hidden_size is not None  # ModelConfig._experts_fit
        for expert in range(model.num_experts):
            our_expert, their_expert = f"{ours}.mlp.experts.local_experts.{expert}", f"{theirs}.mlp.experts.{expert}"
            found |= _feed_forward(our_expert, their_expert, hidden, model.expert_ffn_hidden_size)
    return found


_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}


def _feed_forward(ours: str, theirs: str, hidden: int, ffn: int) -> dict[str, Weight]:
    gate_and_up = tuple(Source(f"{theirs}.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up"))
    return {
        f"{ours}.linear_fc1.weight": Weight(gate_and_up, split=0),
        f"{ours}.linear_fc2.weight": Weight((Source(f"{theirs}.down_proj.weight", (hidden, ffn)),), split=1),
    }


def sources(found: dict[str, Weight]) -> dict[str, Source]:
    """All tensors that the files of a model hold, by name."""
    return {source.name: source for weight in found.values() for source in weight.sources}


def pieces(weight: Weight, tensor: Tensor, rank: int = 0, size: int = 1) -> Iterator[Piece]:
    """Where the sources of `weight` lie in the tensor that tensor-parallel rank `rank` of `size` has of it."""
    if weight.split is None:
        rank, size = 0, 1
    if weight.padded:
        (source,) = weight.sources
        first = min(rank * len(tensor), source.shape[0])
        last = min(first + len(tensor), source.shape[0])
        yield Piece(source, (slice(first, last),), tensor[None, : last - first])
        return
    if weight.blocks is not None and weight.blocks % size:
        yield from _part_of_a_block(weight, weight.blocks, tensor, rank)
        return
    blocks = 1 if weight.blocks is None else weight.blocks // size
    shares = [source.shape[weight.split or 0] // size for source in weight.sources]
    index = [(slice(None),) * (weight.split or 0) + (slice(rank * share, (rank + 1) * share),) for share in shares]
    rows = [source.shape[0] // (size if weight.split == 0 else 1) // blocks for source in weight.sources]
    views = tensor.view(blocks, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    yield from map(Piece, weight.sources, index, views)


def _part_of_a_block(weight: Weight, blocks: int, tensor: Tensor, rank: int) -> Iterator[Piece]:
    """With more ranks than key/value heads, each has some rows of one block."""
    rows = [source.shape[0] // blocks for source in weight.sources]
    block, first = divmod(rank * len(tensor), sum(rows))
    begin = 0
    for source, length in zip(weight.sources, rows, strict=True):
        low, high = max(first, begin), min(first + len(tensor), begin + length)
        if low < high:
            start = block * length + low - begin
            yield Piece(source, (slice(start, start + high - low),), tensor[None, low - first : high - first])
        begin += length
