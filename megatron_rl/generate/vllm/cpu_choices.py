"""Choices of experts in vLLM's build for CPUs (0.32), which returns them with its newer model runner alone, and has the
older one. Builds for GPUs return them themselves.

All parts are vLLM's: what records the choices of a step, keeps them by blocks of the cache and hands them to the
scheduler. Here the older runner calls them as the newer one does.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

VARIABLE = "MRL_VLLM_RETURNS_CHOICES"
"""Variable of vLLM's processes that asks for it."""


def install() -> None:
    """Let vLLM accept the option in this process, and its model runner return choices, if it is asked to."""
    if VARIABLE not in os.environ:
        return
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    if hasattr(CPUModelRunner, "choices"):
        return
    VllmConfig._verify_aux_output_compatibility = lambda self: None  # what it asks of a replica, engine_limits asks too
    CPUModelRunner.choices = None
    CPUModelRunner.initialize_kv_cache = _initialized(CPUModelRunner.initialize_kv_cache)
    CPUModelRunner.execute_model = _executed(CPUModelRunner.execute_model)
    CPUModelRunner.sample_tokens = _sampled(CPUModelRunner.sample_tokens)


def _initialized(initialize_kv_cache: Any) -> Any:
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    def initialize(runner: Any, kv_cache_config: Any, is_profiling: bool = False, **further: Any) -> None:
        initialize_kv_cache(runner, kv_cache_config, is_profiling, **further)
        if runner.vllm_config.aux_output_config.enabled and not is_profiling:
            runner.choices = get_aux_output_connector(runner.model, runner.vllm_config, kv_cache_config)

    return initialize


def _executed(execute_model: Any) -> Any:
    def execute(runner: Any, scheduler_output: Any, *further: Any, **named: Any) -> Any:
        if runner.choices is None:
            return execute_model(runner, scheduler_output, *further, **named)
        runner.choices.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute_model(runner, scheduler_output, *further, **named)
        runner.choices_of_step = None
        if scheduler_output.total_num_scheduled_tokens:
            batch = runner.input_batch
            counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
            runner.choices_of_step = runner.choices.prepare_output(
                SimpleNamespace(
                    req_ids=batch.req_ids,
                    query_start_loc_np=np.cumsum([0, *counts]),
                    num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
                )
            )
        return output

    return execute


def _sampled(sample_tokens: Any) -> Any:
    def sample(runner: Any, *arguments: Any, **named: Any) -> Any:
        output = sample_tokens(runner, *arguments, **named)
        if runner.choices is not None and (pending := runner.choices_of_step) is not None:
            runner.choices_of_step = None
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    return sample
