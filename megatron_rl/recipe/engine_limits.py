"""Recipes that an engine cannot run. Pure, no torch: a run's configuration asks when it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from megatron_rl.recipe.device_turns import sleeps
from megatron_rl.recipe.engines import capabilities_of
from megatron_rl.recipe.hf_config import architecture_of, features
from megatron_rl.recipe.inference import beyond_megatron, beyond_vllm
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.sections import Sections
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_drafts import has_weights, method_of
from megatron_rl.recipe.vllm_options import CPU_HEAD_SIZES, GPU_SHARE_OPTION, heads_beyond_cpu
from megatron_rl.recipe.vllm_precision import precision_faults


def against_engine(asked: Sections) -> str | None:
    """Say why the engine of a recipe cannot run it; None if it can."""
    engine, inference = asked.inference.engine, asked.inference
    able = capabilities_of(engine)
    if inference.vllm is not None and not able.starts_workers:
        return f"inference.vllm is given, and inference.engine is {engine}: set vllm, or leave the section out"
    reasons = [*_incapable(asked), *(_OF_ENGINE[engine](asked) if engine in _OF_ENGINE else ())]
    return f"inference.engine is {engine}, but {'; and '.join(reasons)}" if reasons else None


def _incapable(asked: Sections) -> Iterator[str]:
    able, lag = capabilities_of(asked.inference.engine), asked.asynchronous.max_lag
    if asked.placement.mode == "partitioned" and not able.own_replicas:
        yield "placement.mode is partitioned, and that engine cannot be replicas of a run: set colocated"
    if (beyond := _beyond_tp(asked)) and not able.has_stages:
        yield f"{beyond}, and that engine splits a replica by placement.inference.tp alone: set 1"
    elif beyond and asked.placement.mode == "colocated":
        yield f"{beyond}, and placement.mode is colocated, where a replica has placement.inference.tp alone: set 1"
    if asked.resume.partial == "regenerate" and not able.repeatable:
        yield "resume.partial is regenerate, and that engine does not repeat its answers bit for bit: set keep"
    if asked.model.router_replay == "rollout" and not able.returns_choices:
        yield "model.router_replay is rollout, and that engine does not return the experts that it chose: set old"
    if lag > 0 and not able.spans_updates:
        yield f"async.max_lag is {lag}, and that engine cannot pause answers during training"


def _megatron(asked: Sections) -> Iterator[str]:
    inference = asked.inference
    if asked.job.device == "cpu":
        yield "job.device is cpu, and that engine needs GPUs"
    if asked.model.dtype == "fp32":
        yield "model.dtype is fp32, and flash-attn needs bf16"
    if asked.model.num_experts is not None:
        yield "model.num_experts is set, and that engine was not tested with experts"
    if asked.model.special is not None:
        yield f"model.{asked.model.special} is given, and that engine computes layers without it"
    if (scaling := asked.model.rope_scaling) is not None and (factor := scaling.cosine_factor) != 1:
        yield f"model.rope_scaling multiplies cosines and sines by {factor:.4g}, and that engine does not"
    if (beyond := beyond_megatron(asked.sampling)) is not None:
        yield f"that engine does not support {beyond}"
    if asked.page_tokens % 256 > 0:
        yield f"inference.page_tokens is {asked.page_tokens}, and flash-attn needs a multiple of 256"
    if inference.cache_tokens is not None and inference.cache_tokens < asked.page_tokens:
        yield f"inference.cache_tokens {inference.cache_tokens} is less than one page of {asked.page_tokens} tokens"
    if inference.max_batch % (tp := _tp(asked)) > 0:
        yield f"inference.max_batch {inference.max_batch} is not a multiple of placement.inference.tp {tp}"


def _vllm(asked: Sections) -> Iterator[str]:
    if (beyond := beyond_vllm(asked.sampling)) is not None:
        yield f"{beyond}; with sampling.temperature 1 they are those over all"
    yield from _choices(asked)
    yield from _cheaper_tokens(asked, asked.inference.own_vllm or VllmConfig())
    if asked.placement.mode == "colocated" and (asked.inference.own_vllm or VllmConfig()).gives(GPU_SHARE_OPTION):
        yield (
            f"inference.vllm.args has {GPU_SHARE_OPTION}, and placement.mode is colocated, where the training ranks "
            "have the GPUs too and inference.cache_tokens says what vLLM's cache takes: leave it out"
        )
    if (asked.inference.own_vllm or VllmConfig()).forms and asked.tokenizer.type != "huggingface":
        yield (
            f"inference.vllm.forms is set and tokenizer.type is {asked.tokenizer.type}, which vLLM cannot load: leave "
            "it out, or use a Hugging Face tokenizer"
        )
    if asked.job.device == "cpu" and (dp := asked.placement.inference.dp) > 1:
        yield f"placement.inference.dp is {dp}, and vLLM on a CPU cannot exchange tokens between parts: set 1"
    if asked.job.device == "cpu" and (pp := asked.placement.inference.pp) > 1:
        yield f"placement.inference.pp is {pp}, and vLLM on a CPU prepares no stage but the first: set 1"
    if asked.job.device == "cpu" and (ep := asked.placement.inference.ep) > 1:
        yield (
            f"placement.inference.ep is {ep}, and vLLM on a CPU crashes where a process has only some experts: set 1, "
            "so that placement.inference.tp splits each expert"
        )
    if asked.job.device == "cpu" and (beyond := heads_beyond_cpu(asked.model)) is not None:
        yield f"the model has {beyond}; {_other_heads(asked.model)}"
    if asked.job.device == "cpu" and asked.model.delta_net and asked.model.dtype == "fp32":
        yield "model.dtype is fp32, and vLLM on a CPU computes gated delta nets in bf16 alone: set bf16"
    if architecture_of(asked.model) is None:
        yield f"vLLM has no model with {features(asked.model)} (see model.qkv_bias and model.qk_norm)"


def _choices(asked: Sections) -> Iterator[str]:
    if asked.model.router_replay != "rollout":
        return
    if not asked.inference.share_prefixes:
        yield (
            "model.router_replay is rollout and inference.share_prefixes is false, and vLLM keeps the choices of "
            "experts by shared prefixes: set share_prefixes to true"
        )
    if (pp := asked.placement.inference.pp) > 1:
        yield (
            f"model.router_replay is rollout and placement.inference.pp is {pp}, and vLLM does not collect the choices "
            "of several stages: set pp to 1, or router_replay to old"
        )
    if asked.job.device == "cpu" and (asked.inference.own_vllm or VllmConfig()).draft:
        yield (
            "model.router_replay is rollout and inference.vllm.args has speculative-config, and on a CPU "
            "it would return the choices for refused drafts too: leave it out"
        )
    if asked.sampling.stop:
        yield (
            "model.router_replay is rollout and sampling.stop is set, and vLLM returns choices of experts with answers "
            "that it ends itself: use sampling.stop_tokens, or set router_replay to old"
        )


def _cheaper_tokens(asked: Sections, vllm: VllmConfig) -> Iterator[str]:
    yield from precision_faults(vllm.args)
    if asked.model.dtype == "fp32" and vllm.precision.weights:
        yield (
            f"inference.vllm.args has {vllm.precision.beyond('fp32')[0]} and model.dtype is fp32, and vLLM quantises "
            "weights of bf16 alone: leave it out, or set bf16"
        )
    if vllm.draft and asked.sampling.min_p > 0:
        yield "sampling.min_p is given, and vLLM ignores it with inference.vllm.args.speculative-config: leave out one"
    if has_weights(vllm.draft) and asked.placement.mode == "colocated" and sleeps(asked.offload):
        yield (
            f"inference.vllm.args.speculative-config names {method_of(vllm.draft)} and placement.mode is colocated, "
            "where vLLM drops the weights of its draft at each step and nothing sends them again: take ngram or "
            "suffix, or set partitioned"
        )


def _other_heads(model: ModelConfig) -> str:
    """Return keys of the model's shape with which vLLM on a CPU has it, as near to the present ones as possible."""
    if model.latent_attention or model.init in ("huggingface", "checkpoint"):
        return "its weights fix that size, so choose another model"
    if model.head_dim is not None:
        near = min(CPU_HEAD_SIZES, key=lambda size: abs(size - model.head_size))
        return f"model.head_dim={near} would do"
    heads = [model.hidden_size // size for size in CPU_HEAD_SIZES if model.hidden_size % size == 0]
    if not heads:
        return f"model.head_dim={CPU_HEAD_SIZES[0]} would do"
    groups = max(1, heads[0] * model.num_query_groups // model.num_attention_heads)
    return f"model.num_attention_heads={heads[0]} model.num_query_groups={groups} would do"


def _beyond_tp(asked: Sections) -> str | None:
    """The first size above 1 by which a replica is split beside tp, such as `placement.inference.pp is 2`."""
    layout = asked.placement.inference
    sizes = {"pp": layout.pp, "dp": layout.dp, "ep": layout.ep}
    return next((f"placement.inference.{key} is {size}" for key, size in sizes.items() if size > 1), None)


def _tp(asked: Sections) -> int:
    return asked.placement.inference.tp or asked.placement.training.tp


_OF_ENGINE: Mapping[str, Callable[[Sections], Iterator[str]]] = {"megatron": _megatron, "vllm": _vllm}
