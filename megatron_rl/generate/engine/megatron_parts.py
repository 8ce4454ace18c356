"""Construction of megatron-core's dynamic engine for a policy. 0.16.1 and 0.19 name and divide its parts differently;
only this file knows how."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import attention
from torch import Tensor

from megatron_rl.model.platform.megatron_core import not_found
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

with not_found("wandb"):  # megatron-core would log its own metrics
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

RELEASE = importlib.metadata.version("megatron-core")
FLASH_ATTENTION = "2.7.3"


@dataclass(frozen=True, slots=True)
class EngineSizes:
    sequences: int
    prompt_tokens: int
    """Prompt tokens computed in one step, besides one token of every sequence."""
    longest: int
    pages: int
    page_tokens: int
    share_prefixes: bool
    """Whether answers share the pages of a common prefix. 0.16.1 cannot do that."""


def check_requirements() -> None:
    """Raise ConfigurationError if megatron-core's engine cannot run with the installed packages."""
    missing = []
    if not RELEASE.startswith(("0.16.1", "0.19.")):
        missing.append(f"megatron-core 0.16.1 or 0.19 (this is {RELEASE})")
    if not (getattr(attention, "HAVE_FA4", False) or attention.HAVE_FA3 or _has_flash_attention()):
        missing.append(f"flash-attn {FLASH_ATTENTION} or later")
    if attention.rearrange is None:
        missing.append("einops")
    if missing:
        raise ConfigurationError(
            f"inference.engine is megatron, which needs {' and '.join(missing)}: "
            "use an image that has them, or inference.engine=native"
        )


def _has_flash_attention() -> bool:
    try:
        return bool(attention.is_fa_min_version(FLASH_ATTENTION))
    except (ImportError, OSError):  # OSError: a library of flash-attn is missing
        return False


def sampling_params(sampling: Sampling, tokens_left: int, end: int, vocabulary: int) -> SamplingParams:
    """Translate to megatron-core's parameters.

    tokens_left: tokens that the answer may still get. end: the end token that megatron-core looks for.
    """
    greedy = sampling.temperature == 0
    top_k = sampling.top_k if sampling.top_k < vocabulary else 0
    return SamplingParams(
        temperature=1.0 if greedy else float(sampling.temperature),
        top_k=1 if greedy else top_k,
        top_p=float(sampling.top_p) if sampling.top_p < 1 and not greedy else 0.0,
        return_log_probs=True,
        skip_prompt_log_probs=True,
        num_tokens_to_generate=tokens_left,
        termination_id=end,
    )


def build_dynamic_engine(gpt: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    """Return an engine with an empty cache.

    gpt: see `megatron_gpt`. vocabulary: number of tokens, without padding of the embedding. seed: of all its random
    numbers, the same on all ranks of a replica.
    """
    gpt.config.inference_sampling_seed = seed
    build = _build_0_16 if RELEASE.startswith("0.16.") else _build_0_19
    return build(gpt, vocabulary, sizes, seed)


def _build_0_16(gpt: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    config, groups = gpt.config, gpt.pg_collection
    context = _Context_0_16(
        params_dtype=config.params_dtype,
        num_layers=config.num_layers,
        kv_channels=config.kv_channels,
        num_attention_heads=config.num_query_groups,
        max_sequence_length=sizes.longest,
        buffer_size_gb=_cache_gib(gpt, sizes),
        max_requests=sizes.sequences,
        max_tokens=_tokens_at_once(gpt, sizes),
        block_size_tokens=sizes.page_tokens,
        pg_collection=groups,
    )
    shape = InferenceWrapperConfig(
        hidden_size=config.hidden_size,
        params_dtype=config.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=gpt.vocab_size,
    )
    wrapper = _TokensAlone(gpt, shape, context, groups)
    wrapper.vocabulary = vocabulary
    controller = TextGenerationController(wrapper, _NoText(), groups.pp)
    return DynamicInferenceEngine(controller, context, random_seed=seed, pg_collection=groups)


def _build_0_19(gpt: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    from megatron.core.inference.config import InferenceConfig

    config = InferenceConfig(
        block_size_tokens=sizes.page_tokens,
        buffer_size_gb=_cache_gib(gpt, sizes),
        max_requests=sizes.sequences,
        max_tokens=_tokens_at_once(gpt, sizes),
        max_sequence_length=sizes.longest,
        pg_collection=gpt.pg_collection,
        enable_chunked_prefill=True,  # as 0.16.1 does
        enable_prefix_caching=sizes.share_prefixes,
        offset_sampling_seed_by_dp_rank=False,
    )
    context = _Context_0_19(gpt.config, config)
    wrapper = _TokensAlone(gpt, context)
    wrapper.vocabulary = vocabulary
    return DynamicInferenceEngine(TextGenerationController(wrapper, _NoText()), context)


def close_dynamic_engine(engine: DynamicInferenceEngine) -> None:
    """Free its cache immediately. Its parts refer to one another, and garbage is collected only every few steps."""
    context = engine.context
    for name in [name for name, value in vars(context).items() if isinstance(value, Tensor)]:
        delattr(context, name)
    if not RELEASE.startswith("0.16."):
        from megatron.core.inference.utils import InferenceMode

        InferenceMode.unset_active()  # a flag of the process: layers with it do not train


def _tokens_at_once(gpt: GPTModel, sizes: EngineSizes) -> int:
    """Return the most tokens of one step: of prompts, and one of each sequence. megatron-core rounds this up in any
    case."""
    tokens: int = DynamicInferenceContext.round_up_tokens(
        sizes.prompt_tokens + sizes.sequences, tp_size=gpt.pg_collection.tp.size()
    )
    return tokens


def _cache_gib(gpt: GPTModel, sizes: EngineSizes) -> float:
    """Return the size in GiB from which megatron-core computes that many pages, plus the one it keeps for padding."""
    config = gpt.config
    heads = max(1, config.num_query_groups // gpt.pg_collection.tp.size())
    slot = 2 * config.num_layers * heads * config.kv_channels * config.params_dtype.itemsize
    return (sizes.pages + 1) * sizes.page_tokens * slot / 1024**3  # exact: dividing by a power of two


class _TokensAlone(GPTInferenceWrapper):
    """Never draws padding of the embedding, whose log-probs would differ from those of training, and draws in fp32:
    megatron-core would compute probabilities in the dtype of the logits."""

    vocabulary: int

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        logits: Tensor = super()._forward(inference_input).float()
        logits[..., self.vocabulary :] = -torch.inf
        return logits


class _Context_0_16(DynamicInferenceContext):
    """Log-probs at the temperature of sampling, before any cut. megatron-core's own log-probs are those of temperature
    1, or of the tokens that remain after the cuts."""

    def temperatures(self) -> Tensor:
        active: Tensor = self.request_metadata["temperature"][self.paused_request_count : self.total_request_count]
        return active

    def calculate_log_probs(self, logits: Tensor, new_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """logits [1, rows, vocabulary]; the first rows belong to the active requests."""
        temperatures = self.temperatures().to(logits.device)
        scaled = logits[:, : len(temperatures)] / temperatures[:, None]
        return super().calculate_log_probs(scaled, new_tokens, *args, **kwargs)


class _Context_0_19(_Context_0_16):
    def temperatures(self) -> Tensor:
        count = self.total_request_count - self.paused_request_count
        active: Tensor = self.active_request_metadata["temperature"][:count]
        return active


class _NoText:
    bos = None
    eod = -1

    def detokenize(self, tokens: list[int]) -> str:
        return ""
