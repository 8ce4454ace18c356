"""Pure: the Hugging Face tensors in each tensor of megatron-core, and their positions in it.

    linear_qkv [(heads + 2 groups) head, hidden]    for each query group: its queries, its key, its value; each gated
                                                    query is followed by its gate
    in_proj, conv1d                                 for each key head of a delta net: see delta_net.py
    linear_fc1 [2 ffn, hidden]                      gate, then up; the same on every tensor-parallel rank
    word_embeddings, output_layer [padded, hidden]  the vocabulary, then rows without a token
    all others                                      unchanged

The names that differ between architectures are in recipe/architectures/.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise

from torch import Tensor

from megatron_rl.recipe.architectures.row import HfNames
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import LatentAttention

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class HfTensor:
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix or vector that is one of Hugging Face's tensors, or rows of it.

    Examples: expert 3 of a tensor [experts, inputs, outputs] is `number` 3, `transposed`. Gate projections, which
    alternate with up projections, are one row of each of `blocks`.
    """

    tensor: HfTensor
    number: int | None = None  # place along the tensor's first axis; None: the tensor is one matrix or vector
    transposed: bool = False
    blocks: int = 1  # equal blocks that the rows of the matrix consist of
    rows: range | None = None  # rows of each block that belong to it; None: all

    @property
    def _matrix(self) -> tuple[int, ...]:
        """Shape of the matrix that contains it."""
        shape = self.tensor.shape if self.number is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = self._matrix
        return (rows if self.rows is None else self.blocks * len(self.rows), *columns)

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole tensor, as it is."""
        return self.number is None and not self.transposed and self.rows is None

    def box(self, axis: int, part: range) -> tuple[slice, ...]:
        """Index of the smallest box of the tensor that contains `part` of the rows (axis 0) or columns (axis 1). Rows
        are those of whole blocks, if there are several."""
        if axis == 0 and self.rows is not None:
            size, taken = self._matrix[0] // self.blocks, len(self.rows)
            first, last = part.start // taken, -(-part.stop // taken)
            if self.blocks == 1:
                part = range(self.rows.start + part.start, self.rows.start + part.stop)
            else:
                part = range(first * size, last * size)
        index = [slice(None)] * axis + [slice(part.start, part.stop)]
        if self.transposed:
            index = [*([] if axis else [slice(None)]), slice(part.start, part.stop)]
        return (*([] if self.number is None else [slice(self.number, self.number + 1)]), *index)

    def taken(self, box: Tensor) -> Tensor:
        """View of the source's elements in a box of its tensor."""
        if self.number is not None:
            box = box[0]
        if self.transposed:
            box = box.transpose(0, 1)
        if self.rows is None or self.blocks == 1:
            return box
        return box.unflatten(0, (-1, self._matrix[0] // self.blocks))[:, self.rows.start : self.rows.stop]


@dataclass(frozen=True, slots=True)
class Weight:
    sources: tuple[Source, ...]  # one after another along the first axis
    split: int | None = None  # axis of each source that tensor-parallel ranks split; None if each has all
    blocks: int | None = None
    """Number of blocks, each with equal parts of all sources, that replace the simple order. Ranks split the rows of
    all blocks."""
    padded: bool = False  # whether rows of zeros may follow

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole weight, without padding."""
        return (sum(source.shape[0] for source in self.sources), *self.sources[0].shape[1:])


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """The part of one source within one tensor of megatron-core."""

    of: Source
    index: tuple[slice, ...]  # box of Hugging Face's tensor that contains the piece
    view: Tensor  # view of the piece in megatron-core's tensor: [blocks, rows, ...].

    @property
    def source(self) -> HfTensor:
        return self.of.tensor

    def within(self, whole: Tensor) -> Tensor:
        """View of the piece in the whole of Hugging Face's tensor, with the elements in the order of `view`."""
        return self.of.taken(whole[self.index])


def weights(model: ModelConfig) -> dict[str, Weight]:
    """Return all weights by megatron-core's names, with layers and experts numbered over the whole model."""
    hidden = model.hidden_size
    assert model.vocab_size is not None  # always in config.json
    table = (model.vocab_size, hidden)
    tied = model.tied_embeddings
    names = names_of(model)
    embedding = f"{names.body}.embed_tokens.weight"
    found = {
        EMBEDDING: Weight((_whole(embedding, *table),), split=0, padded=True),
        "decoder.final_layernorm.weight": Weight((_whole(f"{names.body}.norm.weight", hidden),)),
        # If it is tied, only the last of several pipeline stages of megatron-core has it.
        OUTPUT: Weight((_whole(embedding if tied else HF_OUTPUT, *table),), split=0, padded=True),
    }
    for number in range(model.num_layers):
        found |= layer_weights(model, number, names)
    return found


def layer_weights(model: ModelConfig, number: int, names: HfNames) -> dict[str, Weight]:
    """Return the weights of a layer by megatron-core's names, with experts numbered over the whole model."""
    ours, theirs = f"decoder.layers.{number}", f"{names.body}.layers.{number}"
    found = {
        f"{ours}.{norm}.weight": Weight((_whole(f"{theirs}.{their_norm}.weight", model.hidden_size),))
        for norm, their_norm in names.norms
    }
    if model.latent_attention:
        found |= _latent_attention(model, model.latent_attention, f"{ours}.self_attention", f"{theirs}.self_attn")
    elif model.layer_type(number) == "linear_attention":
        found |= _delta_net(model, names, f"{ours}.self_attention", f"{theirs}.linear_attn")
    else:
        found |= _attention(model, f"{ours}.self_attention", f"{theirs}.self_attn")
    if model.has_experts(number):
        return found | _experts(model, names, f"{ours}.mlp", f"{theirs}.mlp")
    return found | _feed_forward(f"{ours}.mlp", f"{theirs}.mlp", model.hidden_size, model.ffn_hidden_size)


def _whole(name: str, *shape: int) -> Source:
    return Source(HfTensor(name, shape))


def _attention(model: ModelConfig, ours: str, theirs: str) -> dict[str, Weight]:
    hidden, heads, groups, head = model.hidden_size, model.num_attention_heads, model.num_query_groups, model.head_size
    found: dict[str, Weight] = {}
    sizes = {"q": heads * head * (2 if model.attention_gate else 1), "k": groups * head, "v": groups * head}
    for kind, width in [("weight", (hidden,)), *([("bias", ())] if model.qkv_bias else [])]:
        qkv = tuple(_whole(f"{theirs}.{x}_proj.{kind}", rows, *width) for x, rows in sizes.items())
        found[f"{ours}.linear_qkv.{kind}"] = Weight(qkv, split=0, blocks=groups)
    for x in ("q", "k") if model.qk_norm else ():
        found[f"{ours}.{x}_layernorm.weight"] = Weight((_whole(f"{theirs}.{x}_norm.weight", head),))
    found[f"{ours}.linear_proj.weight"] = Weight((_whole(f"{theirs}.o_proj.weight", hidden, heads * head),), split=1)
    if model.output_bias:
        found[f"{ours}.linear_proj.bias"] = Weight((_whole(f"{theirs}.o_proj.bias", hidden),))
    if model.attention_sinks:
        found[f"{ours}.sinks"] = Weight((_whole(f"{theirs}.sinks", heads),), split=0)
    return found


def _delta_net(model: ModelConfig, names: HfNames, ours: str, theirs: str) -> dict[str, Weight]:
    hidden, sizes = model.hidden_size, model.delta_net
    assert sizes is not None  # ModelConfig._layers_fit
    keys, values = sizes.key_heads * sizes.key_head_dim, sizes.value_heads * sizes.value_head_dim

    def query_key_value(name: str, *columns: int) -> tuple[Source, ...]:
        tensor, edges = HfTensor(f"{theirs}.{name}.weight", (2 * keys + values, *columns)), (0, keys, 2 * keys)
        return tuple(Source(tensor, rows=range(first, stop)) for first, stop in pairwise((*edges, 2 * keys + values)))

    def projections(**rows: int) -> tuple[Source, ...]:
        return tuple(_whole(f"{theirs}.in_proj_{name}.weight", count, hidden) for name, count in rows.items())

    if names.delta_by_key_heads:
        inputs = projections(qkvz=2 * keys + 2 * values, ba=2 * sizes.value_heads)
    else:
        inputs = query_key_value("in_proj_qkv", hidden) + projections(
            z=values, b=sizes.value_heads, a=sizes.value_heads
        )
    convolution = query_key_value("conv1d", 1, sizes.conv_kernel)
    return {
        f"{ours}.in_proj.weight": Weight(inputs, split=0, blocks=sizes.key_heads),
        f"{ours}.conv1d.weight": Weight(convolution, split=0, blocks=sizes.key_heads),
        f"{ours}.dt_bias": Weight((_whole(f"{theirs}.dt_bias", sizes.value_heads),), split=0),
        f"{ours}.A_log": Weight((_whole(f"{theirs}.A_log", sizes.value_heads),), split=0),
        f"{ours}.out_norm.weight": Weight((_whole(f"{theirs}.norm.weight", sizes.value_head_dim),)),
        f"{ours}.out_proj.weight": Weight((_whole(f"{theirs}.out_proj.weight", hidden, values),), split=1),
    }


def _latent_attention(model: ModelConfig, latent: LatentAttention, ours: str, theirs: str) -> dict[str, Weight]:
    hidden, heads, queries = model.hidden_size, model.num_attention_heads, model.num_attention_heads * model.head_size
    rank, values = latent.kv_lora_rank, latent.v_head_dim
    found = {
        "linear_kv_down_proj": Weight(
            (_whole(f"{theirs}.kv_a_proj_with_mqa.weight", rank + latent.qk_rope_head_dim, hidden),)
        ),
        "kv_layernorm": Weight((_whole(f"{theirs}.kv_a_layernorm.weight", rank),)),
        "linear_kv_up_proj": Weight(
            (_whole(f"{theirs}.kv_b_proj.weight", heads * (latent.qk_nope_head_dim + values), rank),), split=0
        ),
        "linear_proj": Weight((_whole(f"{theirs}.o_proj.weight", hidden, heads * values),), split=1),
    }
    if latent.q_lora_rank is None:
        found["linear_q_proj"] = Weight((_whole(f"{theirs}.q_proj.weight", queries, hidden),), split=0)
    else:
        found["linear_q_down_proj"] = Weight((_whole(f"{theirs}.q_a_proj.weight", latent.q_lora_rank, hidden),))
        found["q_layernorm"] = Weight((_whole(f"{theirs}.q_a_layernorm.weight", latent.q_lora_rank),))
        found["linear_q_up_proj"] = Weight((_whole(f"{theirs}.q_b_proj.weight", queries, latent.q_lora_rank),), split=0)
    return {f"{ours}.{name}.weight": weight for name, weight in found.items()}


def _experts(model: ModelConfig, names: HfNames, ours: str, theirs: str) -> dict[str, Weight]:
    hidden, count, ffn = model.hidden_size, model.num_experts, model.expert_ffn_hidden_size
    assert count is not None and ffn is not None  # ModelConfig._experts_fit
    router = f"{theirs}.{names.router}"
    found = {f"{ours}.router.weight": Weight((_whole(f"{router}.weight", count, hidden),))}
    if model.router.linear_bias:
        found[f"{ours}.router.bias"] = Weight((_whole(f"{router}.bias", count),))
    if model.router.correction_bias:
        found[f"{ours}.router.expert_bias"] = Weight((_whole(f"{router}.e_score_correction_bias", count),))
    if width := model.shared_expert_ffn_hidden_size:
        found |= _feed_forward(f"{ours}.shared_experts", f"{theirs}.{names.shared_expert}", hidden, width)
    if model.shared_expert_gate:
        gate = _whole(f"{theirs}.{names.shared_expert}_gate.weight", 1, hidden)
        found[f"{ours}.shared_experts.gate_weight"] = Weight((gate,))
    for expert in range(count):
        our_expert = f"{ours}.experts.local_experts.{expert}"
        if names.stacked_experts:
            found |= _stacked_expert(model, expert, our_expert, f"{theirs}.experts")
        else:
            found |= _feed_forward(our_expert, f"{theirs}.experts.{expert}", hidden, ffn, bias=model.expert_bias)
    return found


def _feed_forward(ours: str, theirs: str, hidden: int, ffn: int, *, bias: bool = False) -> dict[str, Weight]:
    gate_and_up = tuple(_whole(f"{theirs}.{name}_proj.weight", ffn, hidden) for name in ("gate", "up"))
    found = {
        f"{ours}.linear_fc1.weight": Weight(gate_and_up, split=0),
        f"{ours}.linear_fc2.weight": Weight((_whole(f"{theirs}.down_proj.weight", hidden, ffn),), split=1),
    }
    if bias:
        both = tuple(_whole(f"{theirs}.{name}_proj.bias", ffn) for name in ("gate", "up"))
        found[f"{ours}.linear_fc1.bias"] = Weight(both, split=0)
        found[f"{ours}.linear_fc2.bias"] = Weight((_whole(f"{theirs}.down_proj.bias", hidden),))
    return found


def _stacked_expert(model: ModelConfig, expert: int, ours: str, theirs: str) -> dict[str, Weight]:
    """Weights of an expert of gpt-oss, whose matrices are [inputs, outputs], with alternating gate and up projections,
    in one tensor for all experts of the layer."""
    hidden, count, ffn = model.hidden_size, model.num_experts or 0, model.expert_ffn_hidden_size or 0
    inner = HfTensor(f"{theirs}.gate_up_proj", (count, hidden, 2 * ffn))
    outer = HfTensor(f"{theirs}.down_proj", (count, ffn, hidden))
    first, second = (range(1), range(1, 2))
    found = {
        "linear_fc1.weight": Weight(tuple(Source(inner, expert, True, ffn, rows) for rows in (first, second)), split=0),
        "linear_fc2.weight": Weight((Source(outer, expert, True),), split=1),
    }
    if model.expert_bias:
        biases = HfTensor(f"{theirs}.gate_up_proj_bias", (count, 2 * ffn))
        both = tuple(Source(biases, expert, False, ffn, rows) for rows in (first, second))
        found["linear_fc1.bias"] = Weight(both, split=0)
        found["linear_fc2.bias"] = Weight((Source(HfTensor(f"{theirs}.down_proj_bias", (count, hidden)), expert),))
    return {f"{ours}.{name}": weight for name, weight in found.items()}


def sources(found: Mapping[str, Weight]) -> dict[str, HfTensor]:
    return {source.tensor.name: source.tensor for weight in found.values() for source in weight.sources}


def bundles(found: Mapping[str, Weight]) -> list[list[str]]:
    """Group the names of weights so that each of Hugging Face's tensors comes from one group: alone, or all that have
    parts of the same tensor, such as the experts of a layer that are stacked. The order is that of their first ones."""
    group_of: dict[str, list[str]] = {}  # by tensor
    for name, weight in found.items():
        tensors = {source.tensor.name for source in weight.sources}
        met = {id(group): group for tensor in tensors if (group := group_of.get(tensor)) is not None}
        if len(met) == 1:
            (group,) = met.values()
            group.append(name)
        else:
            group = [*chain.from_iterable(met.values()), name]
            tensors |= {tensor for tensor, other in group_of.items() if id(other) in met}
        group_of |= dict.fromkeys(tensors, group)
    return list({id(group): group for group in group_of.values()}.values())


def pieces(weight: Weight, tensor: Tensor, rank: int = 0, size: int = 1) -> Iterator[TensorPiece]:
    """Locate the sources of `weight` in the tensor that tensor-parallel rank `rank` of `size` has of it."""
    if weight.split is None:
        rank, size = 0, 1
    if weight.padded:
        (source,) = weight.sources
        first = min(rank * len(tensor), source.shape[0])
        last = min(first + len(tensor), source.shape[0])
        yield TensorPiece(source, source.box(0, range(first, last)), tensor[None, : last - first])
        return
    if weight.blocks is not None and weight.blocks % size:
        yield from _part_of_a_block(weight, weight.blocks, tensor, rank)
        return
    # Example: linear_qkv of 8 query heads in 4 groups, each head of size 2, on rank 1 of 2. The tensor has 16 rows in 2
    # blocks (groups 2 and 3), each with 4 rows of q, 2 of k and 2 of v. The rank's share of q_proj is rows 8..15, which
    # are consecutive there but not here, so the view is [2 blocks, 4 rows, hidden] and copies in the order of blocks.
    blocks = 1 if weight.blocks is None else weight.blocks // size
    axis = weight.split or 0
    shares = [source.shape[axis] // size for source in weight.sources]
    rows = [source.shape[0] // (size if weight.split == 0 else 1) // blocks for source in weight.sources]
    views = tensor.view(blocks, sum(rows), *tensor.shape[1:]).split(rows, dim=1)
    for source, share, view in zip(weight.sources, shares, views, strict=True):
        yield TensorPiece(source, source.box(axis, range(rank * share, (rank + 1) * share)), view)


def _part_of_a_block(weight: Weight, blocks: int, tensor: Tensor, rank: int) -> Iterator[TensorPiece]:
    """Locate them if there are more ranks than key/value heads: each rank has some rows of one block."""
    rows = [source.shape[0] // blocks for source in weight.sources]
    block, first = divmod(rank * len(tensor), sum(rows))
    begin = 0
    for source, length in zip(weight.sources, rows, strict=True):
        low, high = max(first, begin), min(first + len(tensor), begin + length)
        if low < high:
            start = block * length + low - begin
            yield TensorPiece(
                source, source.box(0, range(start, start + high - low)), tensor[None, low - first : high - first]
            )
        begin += length


def matrices_of(weight: Weight, tensor: Tensor) -> list[Tensor]:
    """Split a whole weight, without padding, into its sources."""
    return [piece.view.reshape(piece.of.shape) for piece in pieces(weight, tensor)]


class Assembly:
    """Hugging Face's tensors, put together from the sources of weights in any order."""

    def __init__(self, found: Mapping[str, Weight]) -> None:
        """found: weights that the tensors consist of, by any names."""
        self._missing = Counter(source.tensor.name for weight in found.values() for source in weight.sources)
        self._begun: dict[str, Tensor] = {}

    def add(self, source: Source, matrix: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensor with its name once its last source is here. matrix: [source.shape]."""
        name = source.tensor.name
        if source.is_whole:
            yield name, matrix
            return
        if name not in self._begun:
            self._begun[name] = matrix.new_empty(source.tensor.shape)
        place = source.taken(self._begun[name][source.box(0, range(source.shape[0]))])
        place.copy_(matrix.reshape(place.shape))
        self._missing[name] -= 1
        if not self._missing[name]:
            yield name, self._begun.pop(name)
