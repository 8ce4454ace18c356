"""Recipe keys of generation: how answers are sampled, and how many at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from megatron_rl.model.config import ModelConfig
from megatron_rl.section import (
    LaterPath,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)

MOST_STOPS = 16

StopString = Annotated[str, Field(min_length=1, max_length=256)]


class Sampling(Section):
    """How training answers are sampled. Log-probs are always those of softmax(logits / temperature), before
    top_k, top_p and min_p."""

    temperature: NonNegativeFloat = 1.0
    """0 is greedy."""
    top_p: Probability = 1.0
    top_k: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """0 keeps the whole vocabulary."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less likely than this fraction of the likeliest."""
    max_new_tokens: PositiveInt
    """Longest answer, the end token included."""
    min_new_tokens: NonNegativeInt = 0
    """No end token and none of `stop_tokens` is drawn before an answer has so many tokens; a stop string still ends it.
    Log-probs stay those of all tokens."""
    stop: Annotated[tuple[StopString, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """An answer ends with the token that completes one of these strings. At most 16, of 1 to 256 characters."""
    stop_tokens: Annotated[tuple[NonNegativeInt, ...], Field(max_length=MOST_STOPS, strict=False)] = ()
    """Token ids that end an answer, beside the tokenizer's own end tokens. At most 16."""

    @model_validator(mode="after")
    def _can_be_met(self) -> Sampling:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}")
        if any("\ufffd" in text for text in self.stop):
            raise ValueError(
                "stop holds U+FFFD, which stands for bytes that are no text: no answer is known to have it"
            )
        return self


MOST_BIASED = 1024
"""Tokens that one request may bias."""

Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class AdjustedSampling(Sampling):
    """Sampling from adjusted logits, which clients of a server may ask for. It is no part of a recipe, as training
    would learn from answers of another distribution than the policy's.

    Biases come first, then the repetition, frequency and presence penalties, then temperature, top_k, top_p and min_p.
    Log-probs stay those of `Sampling`: of the policy's own logits.
    """

    presence_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logits of tokens as often as the answer has them."""
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Divides positive logits of tokens that the prompt or the answer has, and multiplies negative ones."""
    logit_bias: Annotated[tuple[tuple[NonNegativeInt, Bias], ...], Field(max_length=MOST_BIASED, strict=False)] = ()
    """(token, what is added to its logit), each token once."""
    ignore_eos: bool = False
    """Whether end tokens are tokens like others: only `stop`, `stop_tokens` and `max_new_tokens` end an answer."""

    @property
    def adjustments(self) -> list[str]:
        """Names of what differs from `Sampling`."""
        own = type(self).model_fields.keys() - Sampling.model_fields.keys()
        return sorted(name for name in own if getattr(self, name) != type(self).model_fields[name].default)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the end is adjusted."""
        return bool({*self.adjustments} - {"ignore_eos"})

    @model_validator(mode="after")
    def _biases_each_token_once(self) -> AdjustedSampling:
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        return self


def ends_of(sampling: Sampling, end_ids: Iterable[int]) -> tuple[int, ...]:
    """Tokens that end an answer, perhaps none. end_ids: those that end an answer by default."""
    ignored = isinstance(sampling, AdjustedSampling) and sampling.ignore_eos
    return (*(() if ignored else sorted(end_ids)), *sampling.stop_tokens)


PAGE_TOKENS = {"cpu": 16, "cuda": 256}
"""Places of a page by `job.device`: few share more, and flash kernels for pages want multiples of 256."""


def beyond_megatron(sampling: Sampling) -> str | None:
    """What megatron-core's dynamic engine cannot do of this, by name; None where it can do all."""
    if sampling.min_p > 0:
        return "sampling.min_p"
    if sampling.min_new_tokens > 0:
        return "sampling.min_new_tokens"
    if sampling.top_k > 0 and sampling.top_p < 1:
        return "sampling.top_k together with top_p"
    return None


def beyond_vllm(sampling: Sampling, *, processed_logprobs: bool) -> str | None:
    """Why vLLM cannot tell the log-probs of these samples, which are those of softmax(logits / temperature) over all
    tokens; None where it can."""
    if not processed_logprobs and sampling.temperature not in (0.0, 1.0):
        return (
            f"sampling.temperature {sampling.temperature}: vLLM's raw log-probs are those of temperature 1; start it "
            "with --logprobs-mode processed_logprobs and say so (processed_logprobs)"
        )
    cuts = {
        "sampling.top_p": sampling.top_p < 1,
        "sampling.top_k": sampling.top_k > 0,
        "sampling.min_p": sampling.min_p > 0,
        "sampling.min_new_tokens": sampling.min_new_tokens > 0,
    }
    if processed_logprobs and (cut := [name for name, asked in cuts.items() if asked]):
        return f"{cut[0]}: vLLM's processed log-probs are those of what is left, not of all tokens"
    return None


class ServerConfig(Section):
    """A server that samples by the run's weights, which it is told to read after every step."""

    kind: Literal["vllm", "mrl"]
    """vllm: started with VLLM_SERVER_DEV_MODE=1 on FOLDER/current. mrl: `mrl serve FOLDER/current --weights-from
    FOLDER`."""
    url: Annotated[str, Field(pattern=r"^https?://[^/\s]+(/\S*)?$", json_schema_extra={"words": "http://HOST:PORT/v1"})]
    """With the version of the interface: http://HOST:PORT/v1. All ranks must reach it."""
    folder: LaterPath
    """Where the weights of each version are written and read: on a file system that ranks and server share, in
    /dev/shm where they share a node. Nobody else may be able to write there."""
    model: Annotated[str, Field(min_length=1)] = "policy"
    """Its name there: of vLLM --served-model-name, of `mrl serve` --name."""
    token_file: LaterPath | None = None
    """File on the ranks' nodes that holds the server's token ..."""
    token_variable: str | None = None
    """... or the name of an environment variable that does: one of the cluster profile's `secrets`."""
    processed_logprobs: bool = False
    """Of vllm: started with --logprobs-mode processed_logprobs, which a temperature other than 1 needs."""
    answer_limit_s: PositiveFloat = 3600.0
    """Longest wait for one answer, which is told when it is whole; and for the server to read new weights."""

    @model_validator(mode="after")
    def _has_one_token(self) -> ServerConfig:
        if self.token_file is not None and self.token_variable is not None:
            raise ValueError("token_file and token_variable are both given: keep the one that the server's token is in")
        if self.kind == "mrl" and self.token_file is None and self.token_variable is None:
            raise ValueError("mrl serve answers nobody without its token: say token_file or token_variable")
        if self.kind == "mrl" and self.processed_logprobs:
            raise ValueError("processed_logprobs is a way to start vLLM, and kind is mrl: leave it out")
        return self


class InferenceConfig(Section):
    """What samples."""

    engine: Literal["native", "megatron", "server"] = "native"
    """native: this project's own; needs nothing. megatron: megatron-core's DynamicInferenceEngine; needs GPUs, bf16, a
    model without experts, flash-attn 2.7.3 or later and einops. It takes neither min_p nor min_new_tokens nor top_k
    together with top_p, and what it draws depends on what else is answered at the same time. server: one that was
    started apart from the run, see `server`; then the ranks only train."""
    server: ServerConfig | None = None
    """Of `engine: server`."""
    max_batch: PositiveInt = 256
    """Sequences decoded together on one replica; the rest wait for a free row."""
    prefill_tokens: PositiveInt = 16384
    """Prompt tokens computed at once; a longer prompt is computed in pieces, between which the others are decoded."""
    cache_tokens: PositiveInt | None = None
    """Places of the key/value cache of one replica; null: of max_batch sequences of full length. With fewer the
    youngest answers give way when it is full, and are gone on with later."""
    page_tokens: PositiveInt | None = None
    """Places of a page, of which the cache consists; only full pages are shared. null: 16 on a CPU, 256 on a GPU, whose
    kernels read pages of a multiple of that."""
    cuda_graphs: bool = True
    """Whether what a GPU does for a token is recorded, once for each of few numbers of rows, and then replayed, instead
    of being told operation by operation. It is not where no kernel reads the cache's pages, nor with experts, in FP8 or
    by engine megatron: attempts/NNN/kernels.json says. false: to find out whether that is at fault."""
    share_prefixes: bool = True
    """Whether the keys and values of a beginning that the cache holds already are used again: of system prompts and
    conversations. Answers to one prompt share it in any case. With engine megatron: whether answers share anything at
    all, which they do not with megatron-core 0.16.1."""


def pages_of(inference: InferenceConfig, page_tokens: int, longest: int) -> tuple[int, int]:
    """Pages of the cache, and places in each, of an engine whose sequences have `longest` tokens at most."""
    page_tokens = min(page_tokens, longest)
    if inference.cache_tokens is not None:
        return inference.cache_tokens // page_tokens, page_tokens
    return inference.max_batch * -(-longest // page_tokens), page_tokens


def without_graphs(inference: InferenceConfig, model: ModelConfig, *, fp8: bool) -> str | None:
    """Why decode steps are not recorded, whatever the device and its kernels; None: they are where those allow it."""
    if inference.engine != "native":
        return f"inference.engine is {inference.engine}"
    if not inference.cuda_graphs:
        return "inference.cuda_graphs is false"
    if model.num_experts is not None:
        return "the host decides how many tokens each expert gets"
    if fp8:
        return "layers in FP8 are not recorded"
    return None
