"""Recipe keys of generation: sampling, engine, cache."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.section import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Probability,
    Section,
)
from megatron_rl.recipe.vllm import VllmConfig

MOST_STOPS = 16  # stop strings, and stop tokens, at most

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Sampling(Section):
    """Sampling of training answers. Log-probs are always those of softmax(logits / temperature) over all tokens, before
    top_k, top_p and min_p."""

    temperature: NonNegativeFloat = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: Probability = 1.0
    """Sample from the smallest set of tokens whose total probability reaches this; 1 keeps all."""
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Sample from this number of likeliest tokens; 0 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    max_new_tokens: PositiveInt
    """Longest answer in tokens, end token included."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest answer in tokens: end tokens and `stop_tokens` are not sampled before. Stop strings still end an answer.
    Log-probs stay those over all tokens."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """Strings that end an answer, with the token that completes one. At most 16, of 1 to 256 characters."""
    stop_tokens: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """Token ids that end an answer, in addition to the tokenizer's end tokens. At most 16."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        if any("\ufffd" in text for text in self.stop):
            raise ValueError("stop holds U+FFFD, which stands for bytes that are not text: no answer can match it")
        return self


class ServedSampling(Sampling):
    """Sampling on request of a server's client. Recipes do not offer it: answers would have no natural end."""

    ignore_eos: bool = False
    """Treat end tokens like other tokens: only `stop`, `stop_tokens` and `max_new_tokens` end an answer."""


def ends_of(sampling: Sampling, end_ids: Iterable[int]) -> tuple[int, ...]:
    """Tokens that end an answer, perhaps none. end_ids: end tokens of the tokenizer."""
    ignored = isinstance(sampling, ServedSampling) and sampling.ignore_eos
    return (*(() if ignored else sorted(end_ids)), *sampling.stop_tokens)


PAGE_TOKENS = {"cpu": 16, "cuda": 256}
"""Default of `page_tokens` by `job.device`. Small pages share more of a prefix; flash kernels need multiples of 256."""


def beyond_megatron(sampling: Sampling) -> str | None:
    """Name the first setting that megatron-core's dynamic engine does not support; None if it supports all."""
    if sampling.min_p > 0:
        return "sampling.min_p"
    if sampling.min_new_tokens > 0:
        return "sampling.min_new_tokens"
    if sampling.top_k > 0 and sampling.top_p < 1:
        return "sampling.top_k together with top_p"
    return None


def beyond_vllm(sampling: Sampling) -> str | None:
    """Name the setting with which vLLM cannot report the log-probs of softmax(logits / temperature) over all tokens;
    None if it can."""
    cuts = {
        "sampling.top_p": sampling.top_p < 1,
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.min_new_tokens": sampling.min_new_tokens > 0,
    }
    if processes_logprobs(sampling) and (cut := [name for name, asked in cuts.items() if asked]):
        return f"{cut[0]}: vLLM's processed log-probs are those over the remaining tokens, not over all"
    return None


def processes_logprobs(sampling: Sampling) -> bool:
    """Whether a vLLM of the run reports log-probs after the temperature (`--logprobs-mode processed_logprobs`), which
    are those after all cuts. Otherwise it reports those of the plain softmax, whatever is cut from it."""
    return sampling.temperature not in (0.0, 1.0)


class InferenceConfig(Section):
    """Engine that generates answers."""

    engine: Literal["auto", "native", "megatron", "vllm"] = "auto"
    """auto: on GPUs vllm, where the section `vllm` is given, the cluster's profile names a vLLM, or the ranks' Python
    has one, and where it can run the recipe; native elsewhere. The submission chooses, says why, and records the
    choice. native: the engine of this project, without further requirements. megatron: megatron-core's
    DynamicInferenceEngine; it needs GPUs, bf16, a model without experts, flash-attn 2.7.3 or later and einops, and
    supports neither min_p, min_new_tokens nor top_k together with top_p; its samples depend on what else is generated
    at the same time. vllm: vLLM, which the run starts (see `vllm`) and sends each version of the weights. In a
    partitioned run it has separate nodes, else it takes turns with the training ranks on the same GPUs. Its answers are
    not repeatable, and a temperature other than 1 excludes top_p, top_k, min_p and min_new_tokens."""
    vllm: VllmConfig | None = None
    """How to start vLLM with `engine: vllm`; default: the defaults of the section."""
    max_batch: PositiveInt = 256
    """Sequences decoded together on one replica; others wait."""
    prefill_tokens: PositiveInt = 16384
    """Prompt tokens computed at once. Longer prompts are split, and other answers are decoded in between."""
    cache_tokens: PositiveInt | None = None
    """Size of the KV cache of one replica, in tokens; default: max_batch sequences of full length. When a smaller cache
    is full, the youngest answers pause and resume later."""
    page_tokens: PositiveInt | None = None
    """Size of a page of the KV cache, in tokens; only full pages are shared. Default: 16 on CPUs, 256 on GPUs, whose
    kernels need multiples of 256."""
    cuda_graphs: bool = True
    """Record the GPU work of a decode step once per batch size and replay it, which saves launching each operation. Not
    used without a kernel for paged caches, with experts that run one by one or with `engine: megatron`;
    attempts/NNN/kernels.json records the choice. Set to false to find out whether graphs cause a problem."""
    share_prefixes: bool = True
    """Reuse cached keys and values of equal prefixes, such as system prompts and earlier turns. Answers to one prompt
    always share its prefix. With `engine: megatron`: whether answers share anything at all, which megatron-core 0.16.1
    does not support."""

    @property
    def own_vllm(self) -> VllmConfig | None:
        """Settings of the vLLM that the run starts; None: it starts none."""
        return (self.vllm or VllmConfig()) if capabilities_of(self.engine).starts_workers else None


def pages_of(inference: InferenceConfig, page_tokens: int, longest: int) -> tuple[int, int]:
    """Number of pages of the cache, and tokens per page, for sequences of at most `longest` tokens."""
    page_tokens = min(page_tokens, longest)
    if inference.cache_tokens is not None:
        return inference.cache_tokens // page_tokens, page_tokens
    return inference.max_batch * -(-longest // page_tokens), page_tokens


def without_graphs(inference: InferenceConfig) -> str | None:
    """Say why decode steps are not recorded, whatever the device and its kernels are; None if they are where those
    allow it."""
    if not capabilities_of(inference.engine).records_steps:
        return f"inference.engine is {inference.engine}"
    if not inference.cuda_graphs:
        return "inference.cuda_graphs is false"
    return None
