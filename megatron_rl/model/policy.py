"""The policy: megatron-core's GPTModel on packed tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import linear, pad

from megatron_rl.model.core_config import DTYPES, transformer_config
from megatron_rl.model.experts import GroupedExperts
from megatron_rl.model.frozen import FrozenPolicy, freezes
from megatron_rl.model.fused import FusedPolicy, why_not_fused
from megatron_rl.model.layer_specs import packed_block_spec, packed_layer_spec
from megatron_rl.model.lora import Adapters
from megatron_rl.model.platform.attention import Layout, PackedSequences
from megatron_rl.model.platform.device import Device, Kernels
from megatron_rl.model.platform.paths import PathLayout, Paths
from megatron_rl.model.prediction import PredictionBlock, with_prediction
from megatron_rl.model.rotation import Rotations, rotation_tables
from megatron_rl.model.router import Replay
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.job import StageEnds
from megatron_rl.recipe.layer_sizes import prediction_kind
from megatron_rl.recipe.model import ModelConfig, Recompute

FP8_ROWS = 16
"""Divisor of the sizes of FP8 products, including the number of tokens."""


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One tensor-parallel rank's rows of the output layer. Each row makes the logit of one token."""

    weight: Tensor  # [rows, hidden]
    tokens: range  # tokens of the first rows; further rows pad the vocabulary
    group: dist.ProcessGroup | None  # ranks that hold the other rows; None where this rank holds all
    in_fp32: bool = False  # whether logits are computed in fp32 whatever the dtypes are

    def logits(self, hidden: Tensor) -> Tensor:
        """[predictors, hidden] -> [predictors, len(tokens)]"""
        weight = self.weight
        if self.in_fp32:
            hidden, weight = hidden.float(), weight.float()
        return linear(hidden, weight)[:, : len(self.tokens)]


class Policy(GPTModel):
    """GPTModel whose forward takes packed tokens with explicit positions and a layout.

    It keeps GPTModel's modules, names and sharded state. Only the data flow differs: megatron-core's own forward counts
    positions from 0 along the sequence dimension, which packed tokens do not.
    """

    adapters: Adapters | None
    embedding_scale: float | None
    recurrent: bool
    """Whether some layers read sequences from their first token on: those of type linear_attention."""
    fp32_output: bool
    model_config: ModelConfig
    platform: Device
    rotations: Rotations
    """Tables of all positions."""
    vocabulary: int

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        select: Tensor | None = None,
        replay: Replay | None = None,
    ) -> Tensor:
        """Return logits of the packed tokens in `select` (all if None), for a policy without a pipeline.

        tokens, positions [tokens], select [selected] -> [selected, len(output().tokens)] in the model's dtype: of this
        rank's part of the vocabulary; in fp32 with `model.fp32_output`. replay: see `hidden`.
        """
        multiple = self.kernels.rows_multiple
        hidden = self.hidden(tokens, positions, layout, multiple=multiple, replay=replay)
        predictors = self.whole(hidden)[:, 0] if select is None else self.predictors(hidden, select)
        count = len(tokens) if select is None else len(select)
        return self.output().logits(pad(predictors, (0, 0, 0, -len(predictors) % multiple)))[:count]

    def frozen(self) -> FrozenPolicy | FusedPolicy | None:
        """Prepare the current weights for a faster `forward` in generation; None without a faster way."""
        if freezes(self, self.model_config, self.kernels):
            output = self.output().weight[: self.vocabulary]
            return FrozenPolicy(self, output.float() if self.fp32_output else output)
        kernels = self.kernels.layer_kernels
        if kernels is None or why_not_fused(self, self.model_config) is not None:
            return None
        return FusedPolicy(self, kernels)

    @contextmanager
    def without_fp8(self) -> Iterator[None]:
        """Multiply in the model's dtype within a `with` block. Generation does: a decode step would spend more time on
        rounding each weight to FP8 again than on multiplying it, and could not be recorded."""
        fp8, self.config.fp8 = self.config.fp8, None
        try:
            yield
        finally:
            self.config.fp8 = fp8

    def without_adapters(self) -> AbstractContextManager[None]:
        """Leave adapters out of all products within a `with` block: the policy is then its base, the initial one. No-op
        for a policy without adapters."""
        return self.adapters.off() if self.adapters else nullcontext()

    def dropout(self, *key: int) -> AbstractContextManager[None]:
        """Drop inputs of adapters within a `with` block, as `model.lora.dropout` says. No-op without adapters.

        key: numbers that, with that of the micro-batch (`begin_microbatch`), determine which inputs.
        """
        return self.adapters.dropping(*key) if self.adapters else nullcontext()

    def begin_microbatch(self, number: int) -> None:
        if self.adapters:
            self.adapters.microbatch = number

    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        layout: Layout,
        received: Tensor | None = None,
        multiple: int = 1,
        replay: Replay | None = None,
    ) -> Tensor:
        """Run packed tokens through this stage of the pipeline, for the next stage or for `predictors`.

        tokens, positions [tokens] -> `hidden_shape`: [tokens, 1, hidden], or this rank's part of them.

        received: output of the previous stage; None on the first. multiple: divisor of the number of computed rows.
        replay: chooses the experts of the tokens, in place of the routers.
        """
        embedded = None
        if received is not None:
            self.decoder.set_input_tensor(received)
        else:
            embedded = self.embedded(tokens, positions, multiple)
        rotations = self.rotations.at(positions)
        arguments = {"rotary_pos_emb": rotations, "packed_seq_params": layout, "attention_bias": replay}
        output: Tensor = self.decoder(embedded, attention_mask=None, **arguments)
        self.decoder.set_input_tensor(None)
        return output

    def embedded(self, tokens: Tensor, positions: Tensor, multiple: int = 1) -> Tensor:
        """Embed packed tokens on the first stage. Arguments and result as of `hidden`."""
        if padding := self._padding(len(tokens), multiple):
            tokens = pad(tokens, (0, padding))
        # Make the strides those of a new tensor. megatron-core's embedding is transposed, and torch multiplies such a
        # tensor by a copy of the weight per token if the weight needs no gradient.
        embedded: Tensor = self.embedding(tokens[None], positions[None])[:, 0].unsqueeze(1)
        return embedded if self.embedding_scale is None else embedded * self.embedding_scale

    def hidden_shape(self, tokens: int) -> tuple[int, int, int]:
        rows = tokens + self._padding(tokens)
        return rows // self._tensor.size() if self.config.sequence_parallel else rows, 1, self.config.hidden_size

    def predictors(self, hidden: Tensor, select: Tensor) -> Tensor:
        """Select [selected, hidden] from `hidden` of the last stage, on every tensor-parallel rank. `output` turns them
        into logits. Their gradient is summed over those ranks, each with its part of the vocabulary."""
        if self.config.sequence_parallel:
            return self.kernels.gather(self.whole(hidden), select).squeeze(1)
        selected = self.kernels.gather(hidden, select)  # answers with a common prefix select the same token
        return self.whole(selected).squeeze(1)

    def output(self) -> OutputPart:
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        holder = self.embedding.word_embeddings if tied and self.pre_process else self.output_layer
        for wait in holder._forward_pre_hooks.values():  # of DDP, for weights that it still gathers
            wait(holder, ())
        # Example: 1,000 tokens padded to 1,024 on two ranks. Rank 0 has tokens 0..511; rank 1 has 512..999, and its
        # last 24 rows make no logits. A rank may have padding alone: its range is then empty.
        first = self._tensor.rank() * len(weight)
        group = self._tensor if self._tensor.size() > 1 else None
        tokens = range(min(first, self.vocabulary), min(first + len(weight), self.vocabulary))
        return OutputPart(weight, tokens, group, self.fp32_output)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Gather [rows, vocab] on every tensor-parallel rank from their parts, [rows, len(output().tokens)]."""
        ranks = self._tensor.size()
        if ranks == 1:
            return logits
        part = pad(logits, (0, self.vocab_size // ranks - logits.shape[1]))
        parts = [torch.empty_like(part) for _ in range(ranks)]
        dist.all_gather(parts, part, group=self._tensor)
        return torch.cat(parts, dim=1)[:, : self.vocabulary]

    def whole(self, hidden: Tensor) -> Tensor:
        """Gather the parts of `hidden` that ranks have under sequence parallelism, padding included."""
        if self.config.sequence_parallel:
            gathered: Tensor = gather_from_sequence_parallel_region(hidden, group=self._tensor)
            return gathered
        if self._tensor.size() > 1:
            return copy_to_tensor_model_parallel_region(hidden, group=self._tensor)
        return hidden

    def part(self, rows: Tensor) -> Tensor:
        """Pad [tokens, 1, hidden], which all tensor-parallel ranks have, to this rank's part of it: `hidden_shape`."""
        if padding := self._padding(len(rows)):
            rows = pad(rows, (0, 0, 0, 0, 0, padding))
        return rows.chunk(self._tensor.size())[self._tensor.rank()] if self.config.sequence_parallel else rows

    def _padding(self, tokens: int, multiple: int = 1) -> int:
        """Number of tokens to add so that the tensor-parallel ranks of sequence parallelism have equal parts, and FP8
        products supported sizes."""
        parts = self._tensor.size() if self.config.sequence_parallel else 1
        return -tokens % (parts * (FP8_ROWS if self.config.fp8 else multiple))

    @property
    def prediction(self) -> PredictionBlock | None:
        """The prediction layer on the last stage, if it is trained."""
        found = self._modules.get("mtp")
        assert found is None or isinstance(found, PredictionBlock)
        return found

    @property
    def device(self) -> torch.device:
        return self.platform.device

    @property
    def kernels(self) -> Kernels:
        return self.platform.kernels

    def layout(self, packed: PackedSequences, part: Tensor | None = None) -> Layout:
        sinks = self.model_config.attention_sinks
        attention = self.kernels.attention_layout(packed, self.config.params_dtype, part, sinks=sinks)
        return PathLayout(attention, Paths.of(packed, self.device)) if self.recurrent else attention

    def prepare(self, model: ModelConfig, tokens: int, platform: Device) -> None:
        """Set what depends on the model's features, the platform and the vocabulary size without padding, and tabulate
        the rotations."""
        self.model_config, self.vocabulary, self.platform = model, tokens, platform
        self._tensor = self.pg_collection.tp
        self.recurrent = model.delta_net is not None
        # Rounded as in transformers, on the CPU even where the model is built without memory.
        root = torch.tensor(math.sqrt(model.hidden_size), dtype=self.config.params_dtype, device="cpu").item()
        self.embedding_scale = root if model.scaled_embedding else None
        self.rotations = rotation_tables(model, self.config.params_dtype, platform.device)


def build_policy(
    model: ModelConfig,
    vocab_size: int,
    platform: Device,
    recompute: Recompute = "none",
    *,
    sequence_parallel: bool = False,
    groups: ProcessGroupCollection | None = None,
    stage_ends: StageEnds = (None, None),
    initialize: bool = True,
) -> Policy:
    """Build this rank's part of the policy on the platform's device, with random weights from torch's generator.

    Args:
        vocab_size: the tokenizer's; see `ModelConfig.padded_vocab_size` for the embedding's.
        groups: ranks that share the model; default: megatron-core's own, those of the training.
        stage_ends: layers of the first and of the last pipeline stage.
        initialize: False if weights will be loaded; until then they are arbitrary.

    Raises:
        ConfigurationError: the tokenizer has more tokens than `model.vocab_size`, or the groups do not divide the
        model.
    """
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    _check_fit(model, vocab_size, groups, sequence_parallel, stage_ends)
    config = transformer_config(
        model, platform.kernels, groups, sequence_parallel=sequence_parallel, stage_ends=stage_ends
    )
    config.perform_initialization = initialize
    adapters = Adapters.of(model)
    layers = packed_block_spec(config, model, recompute, platform.kernels, groups.pp.rank(), adapters)
    make = partial(
        Policy,
        config=config,
        transformer_layer_spec=layers,
        vocab_size=model.padded_vocab_size(vocab_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=groups.pp.rank() == 0,
        post_process=groups.pp.rank() == groups.pp.size() - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="none",  # layers rotate by Policy.rotations
        pg_collection=groups,
    )
    if model.trains_prediction:
        spec = packed_layer_spec(config, model, prediction_kind(model), recompute, platform.kernels, None)
        make = partial(with_prediction, make, spec)
    policy = platform.build(make, DTYPES[model.dtype])
    for module in policy.modules():
        if isinstance(module, GroupedExperts):
            module.put_weights_together()
    policy.adapters = adapters
    policy.fp32_output = model.fp32_output
    policy.prepare(model, vocab_size, platform)
    return policy


def _check_fit(
    model: ModelConfig, vocab_size: int, groups: ProcessGroupCollection, sequence_parallel: bool, stage_ends: StageEnds
) -> None:
    if model.vocab_size is not None and model.vocab_size < vocab_size:
        raise ConfigurationError(
            f"model.vocab_size {model.vocab_size} is less than the tokenizer's {vocab_size} tokens"
        )
    tp, pp, ep = groups.tp.size(), groups.pp.size(), groups.ep.size()
    if undivided := next(model.undivided(tp, pp, ep, stage_ends=stage_ends), None):
        raise ConfigurationError(f"the model cannot be divided: {undivided}")
    if sequence_parallel and tp == 1:
        raise ConfigurationError("sequence_parallel splits activations between tensor-parallel ranks, but tp is 1")
