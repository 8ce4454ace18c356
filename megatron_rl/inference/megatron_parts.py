"""megatron-core's dynamic engine, put together for a policy: 0.16.1 and 0.19 name and divide its parts differently, and
here is all that we know of that."""

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

from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import Sampling
from megatron_rl.platform.megatron_core import not_found

with not_found("wandb"):  # which it asks for its own record of metrics
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

RELEASE = importlib.metadata.version("megatron-core")
FLASH_ATTENTION = "2.7.3"


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """How much the engine has room for."""

    sequences: int
    """Decoded together."""
    prompt_tokens: int
    """Computed at once, beside a token of every sequence."""
    longest: int
    """Tokens of a prompt and its answer."""
    pages: int
    page_tokens: int
    share_prefixes: bool
    """Whether answers share the pages of what they begin with, which 0.16.1 cannot."""


def check_requirements() -> None:
    """Raises ConfigurationError where megatron-core's engine cannot run with what is installed."""
    missing = []
    if not RELEASE.startswith(("0.16.1", "0.19.")):
        missing.append(f"megatron-core 0.16.1 or 0.19, and this is {RELEASE}")
    if not (getattr(attention, "HAVE_FA4", False) or attention.HAVE_FA3 or _has_flash_attention()):
        missing.append(f"flash-attn {FLASH_ATTENTION} or later")
    if attention.rearrange is None:
        missing.append("einops")
    if missing:
        raise ConfigurationError(
            f"inference.engine is megatron, which needs {' and '.join(missing)}: "
            "use an image that has it, or inference.engine=native"
        )


def _has_flash_attention() -> bool:
    try:
        return bool(attention.is_fa_min_version(FLASH_ATTENTION))
    except (ImportError, OSError):  # OSError: one of its libraries is missing
        return False


def sampling_params(sampling: Sampling, tokens_left: int, end: int, vocabulary: int) -> SamplingParams:
    """In megatron-core's words.

    tokens_left: that the answer may still get. end: the token that it ends itself with.
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


def build_dynamic_engine(twin: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    """An engine with an empty cache of its own.

    twin: see `megatron_gpt`. vocabulary: number of tokens, without those that only pad the embedding. seed: of the
    random numbers of all that it draws, the same on all ranks of a replica.
    """
    twin.config.inference_sampling_seed = seed
    build = _build_0_16 if RELEASE.startswith("0.16.") else _build_0_19
    return build(twin, vocabulary, sizes, seed)


def _build_0_16(twin: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import InferenceWrapperConfig

    config, groups = twin.config, twin.pg_collection
    context = _Context_0_16(
        params_dtype=config.params_dtype,
        num_layers=config.num_layers,
        kv_channels=config.kv_channels,
        num_attention_heads=config.num_query_groups,
        max_sequence_length=sizes.longest,
        buffer_size_gb=_cache_gib(twin, sizes),
        max_requests=sizes.sequences,
        max_tokens=_tokens_at_once(twin, sizes),
        block_size_tokens=sizes.page_tokens,
        pg_collection=groups,
    )
    shape = InferenceWrapperConfig(
        hidden_size=config.hidden_size,
        params_dtype=config.params_dtype,
        inference_batch_times_seqlen_threshold=-1,
        padded_vocab_size=twin.vocab_size,
    )
    wrapper = _TokensAlone(twin, shape, context, groups)
    wrapper.vocabulary = vocabulary
    controller = TextGenerationController(wrapper, _NoText(), groups.pp)
    return DynamicInferenceEngine(controller, context, random_seed=seed, pg_collection=groups)


def _build_0_19(twin: GPTModel, vocabulary: int, sizes: EngineSizes, seed: int) -> DynamicInferenceEngine:
    from megatron.core.inference.config import InferenceConfig

    config = InferenceConfig(
        block_size_tokens=sizes.page_tokens,
        buffer_size_gb=_cache_gib(twin, sizes),
        max_requests=sizes.sequences,
        max_tokens=_tokens_at_once(twin, sizes),
        max_sequence_length=sizes.longest,
        pg_collection=twin.pg_collection,
        enable_chunked_prefill=True,  # as 0.16.1 does
        enable_prefix_caching=sizes.share_prefixes,
        offset_sampling_seed_by_dp_rank=False,
    )
    context = _Context_0_19(twin.config, config)
    wrapper = _TokensAlone(twin, context)
    wrapper.vocabulary = vocabulary
    return DynamicInferenceEngine(TextGenerationController(wrapper, _NoText()), context)


def close_dynamic_engine(engine: DynamicInferenceEngine) -> None:
    """Free its cache at once: its parts refer to one another, and garbage is looked for every few steps only."""
    context = engine.context
    for name in [name for name, value in vars(context).items() if isinstance(value, Tensor)]:
        delattr(context, name)
    if not RELEASE.startswith("0.16."):
        from megatron.core.inference.utils import InferenceMode

        InferenceMode.unset_active()  # a flag of the process, by which layers know that nobody trains


def _tokens_at_once(twin: GPTModel, sizes: EngineSizes) -> int:
    """Of prompts, and one of every sequence. megatron-core pads to such multiples, whatever it was given as a limit."""
    tokens: int = DynamicInferenceContext.round_up_tokens(
        sizes.prompt_tokens + sizes.sequences, tp_size=twin.pg_collection.tp.size()
    )
    return tokens


def _cache_gib(twin: GPTModel, sizes: EngineSizes) -> float:
    """The size by which megatron-core comes to that many pages, beside the one that it keeps for padding."""
    config = twin.config
    heads = max(1, config.num_query_groups // twin.pg_collection.tp.size())
    place = 2 * config.num_layers * heads * config.kv_channels * config.params_dtype.itemsize
    return (sizes.pages + 1) * sizes.page_tokens * place / 1024**3  # exact: a power of two


class _TokensAlone(GPTInferenceWrapper):
    """Never draws what only pads the embedding, whose log-probs would differ from those of training, and draws in fp32:
    megatron-core turns logits into probabilities in their own type."""

    vocabulary: int

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        logits: Tensor = super()._forward(inference_input).float()
        logits[..., self.vocabulary :] = -torch.inf
        return logits


class _Context_0_16(DynamicInferenceContext):
    """Log-probs at the temperature at which tokens are drawn, before any cut: megatron-core's own are those of
    temperature 1, or of what the cuts leave."""

    def temperatures(self) -> Tensor:
        """[active requests]"""
        active: Tensor = self.request_metadata["temperature"][self.paused_request_count : self.total_request_count]
        return active

    def calculate_log_probs(self, logits: Tensor, new_tokens: Tensor, *args: Any, **kwargs: Any) -> Any:
        """logits [1, rows, vocabulary], of which the first are one for each active request."""
        temperatures = self.temperatures().to(logits.device)
        scaled = logits[:, : len(temperatures)] / temperatures[:, None]
        return super().calculate_log_probs(scaled, new_tokens, *args, **kwargs)


class _Context_0_19(_Context_0_16):
    def temperatures(self) -> Tensor:
        count = self.total_request_count - self.paused_request_count
        active: Tensor = self.active_request_metadata["temperature"][:count]
        return active


class _NoText:
    """Stands in for a tokenizer: prompts are tokens, and nobody reads the text that answers are turned into."""

    bos = None
    eod = -1

    def detokenize(self, tokens: list[int]) -> str:
        return ""
