"""Pure: the weights of a model by megatron-core's names, each with the Hugging Face tensors in it.

The names that differ between architectures are in recipe/architectures/.
"""

from __future__ import annotations

from itertools import pairwise

from megatron_rl.model.hf_mapping import HfTensor, Source, Weight
from megatron_rl.model.sharded_names import PREDICTION
from megatron_rl.recipe.architectures.row import HfNames
from megatron_rl.recipe.hf_config import names_of
from megatron_rl.recipe.layer_sizes import LayerKind, prediction_kind
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.model_parts import LatentAttention

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HF_OUTPUT = "lm_head.weight"


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
    return found | prediction_weights(model, names) if model.trains_prediction else found


def prediction_weights(model: ModelConfig, names: HfNames) -> dict[str, Weight]:
    """Return the weights of the prediction layer by megatron-core's names."""
    theirs, hidden = names.prediction, model.hidden_size

    def named(name: str, *shape: int) -> Weight:
        return Weight((_whole(f"{name.format(number=model.num_layers)}.weight", *shape),))

    found = {
        "enorm": named(theirs.token_norm, hidden),
        "hnorm": named(theirs.hidden_norm, hidden),
        "eh_proj": named(theirs.projection, hidden, 2 * hidden),
        "final_layernorm": named(theirs.norm, hidden),
    }
    inside = theirs.layer.format(number=model.num_layers)
    return {f"{PREDICTION}{name}.weight": weight for name, weight in found.items()} | _layer(
        model, prediction_kind(model), names, f"{PREDICTION}transformer_layer", inside
    )


def prediction_copies(model: ModelConfig) -> dict[str, str]:
    """Tensors of published files that repeat a weight for the prediction layer, each with the weight's name in
    megatron-core; none unless that layer is trained."""
    theirs = names_of(model).prediction
    output = EMBEDDING if model.tied_embeddings else OUTPUT
    copies = [(theirs.embedding, EMBEDDING), (theirs.output, output)] if model.trains_prediction else []
    return {f"{name.format(number=model.num_layers)}.weight": ours for name, ours in copies if name is not None}


def layer_weights(model: ModelConfig, number: int, names: HfNames) -> dict[str, Weight]:
    """Return the weights of a layer by megatron-core's names, with experts numbered over the whole model."""
    kind = LayerKind(model.layer_type(number), model.has_experts(number))
    return _layer(model, kind, names, f"decoder.layers.{number}", f"{names.body}.layers.{number}")


def _layer(model: ModelConfig, kind: LayerKind, names: HfNames, ours: str, theirs: str) -> dict[str, Weight]:
    found = {
        f"{ours}.{norm}.weight": Weight((_whole(f"{theirs}.{their_norm}.weight", model.hidden_size),))
        for norm, their_norm in names.norms
    }
    if model.latent_attention:
        found |= _latent_attention(model, model.latent_attention, f"{ours}.self_attention", f"{theirs}.self_attn")
    elif kind.attention == "linear_attention":
        found |= _delta_net(model, names, f"{ours}.self_attention", f"{theirs}.linear_attn")
    else:
        found |= _attention(model, f"{ours}.self_attention", f"{theirs}.self_attn")
    if kind.has_experts:
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
    for x, count in (("q", heads), ("k", groups)) if model.qk_norm else ():
        joint = model.qk_norm_of == "layer"
        of_norm = _whole(f"{theirs}.{x}_norm.weight", count * head if joint else head)
        found[f"{ours}.{x}_layernorm.weight"] = Weight((of_norm,), split=0 if joint else None)
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
