"""Pure: the command of `vllm serve` for a replica, and its environment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.config import RunConfig
from megatron_rl.inference.config import processes_logprobs
from megatron_rl.inference.vllm_options import option_name
from megatron_rl.vllm.client import MODEL_NAME
from megatron_rl.vllm.config import VllmConfig
from megatron_rl.vllm.plugin import BACKEND

LARGEST_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU, in each of which is only one sequence; on GPUs it has fewer."""
STEP_LIMIT_S = 1800
"""Seconds of one step of the model; vLLM's own 300 are too few for a long prefill on a busy CPU."""
STREAM_INTERVAL = 16
"""Tokens of an answer in one message: each message costs vLLM and the front about 0.1 ms."""
WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the front's own world, which vLLM's workers would mistake for theirs."""
BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a value by `model.dtype`."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
"""vLLM's name of each `model.dtype`."""


@dataclass(frozen=True, slots=True)
class Served:
    """Paths of one `vllm serve`."""

    model: Path
    """Folder with config.json. vLLM needs no tokenizer, since prompts and answers are tokens."""
    socket: Path
    plugins: Path
    """Folder with the metadata of the plugin, see plugin.write_metadata."""


def vllm_command(config: RunConfig, served: Served, python: str, seed: int) -> list[str]:
    """The command of a replica's `vllm serve`. Options of the run come last, so they win.

    Args:
        python: interpreter that has vLLM.
        seed: of the samples; see seed_of.
    """
    inference, vllm = config.inference, config.inference.vllm or VllmConfig()
    options = given_options(vllm)
    longest = config.sequence_length
    options |= {
        "served-model-name": MODEL_NAME,
        "uds": str(served.socket),
        "enable-scale-out": True,
        "scheduling-policy": "priority",  # lets the probe of new weights precede the answers
        "disable-uvicorn-access-log": True,
        "skip-tokenizer-init": True,
        "load-format": "dummy",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "dtype": DTYPES[config.model.dtype],
        "max-model-len": str(longest),
        "max-num-seqs": str(inference.max_batch),
        # A first prompt is never split: the longest one fits.
        "max-num-batched-tokens": str(max(inference.prefill_tokens, longest)),
        "tensor-parallel-size": str(config.placement.inference.tp or config.placement.training.tp),
        "enable-prefix-caching": inference.share_prefixes,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs" if processes_logprobs(config.sampling) else "raw_logprobs",
        "stream-interval": str(STREAM_INTERVAL),
        "seed": str(seed),
    }
    if config.job.device == "cpu" or not inference.cuda_graphs:
        options["enforce-eager"] = True
    if inference.page_tokens is not None:
        options["block-size"] = str(inference.page_tokens)
    if config.job.device == "cpu" or inference.cache_tokens is not None:
        options["kv-cache-memory-bytes"] = str(cache_bytes(config))
    given = [as_option(name, value) for name, value in options.items()]
    return [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(served.model), *given]


def vllm_environment(
    environ: Mapping[str, str], served: Served, *, cpu: bool, step_limit_s: int = STEP_LIMIT_S
) -> dict[str, str]:
    """The environment of `vllm serve`, from that of the process that starts it.

    step_limit_s: seconds that a step of the model may take before vLLM ends itself.
    """
    found = {name: value for name, value in environ.items() if name not in WORLD_VARIABLES}
    found["PYTHONPATH"] = ":".join([str(served.plugins), *filter(None, [environ.get("PYTHONPATH")])])
    ours = {
        "VLLM_RPC_BASE_PATH": str(served.socket.parent),  # sockets between its processes, in /tmp by default
        "VLLM_SERVER_DEV_MODE": "1",  # opens the routes of weights; the socket is for the front alone
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(step_limit_s),
    }
    if cpu:  # bound to cores, several processes of a machine would share the same ones
        ours["VLLM_CPU_OMP_THREADS_BIND"] = environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return found | ours


def seed_of(config: RunConfig, attempt: int, replica: int, start: int) -> int:
    """Seed of one start of a replica: two never share theirs, or they would sample with the same random numbers."""
    text = f"{config.training.seed} {attempt} {replica} {start}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def cache_bytes(config: RunConfig) -> int:
    """Bytes of the cache of keys and values on each of a replica's GPUs."""
    model, inference = config.model, config.inference
    tp = config.placement.inference.tp or config.placement.training.tp
    block = inference.page_tokens or LARGEST_BLOCK
    tokens = inference.cache_tokens or inference.max_batch * math.ceil(config.sequence_length / block) * block
    groups = max(1, model.num_query_groups // tp)
    return tokens * 2 * model.num_layers * groups * model.head_size * BYTES[model.dtype]


def given_options(vllm: VllmConfig) -> dict[str, str | bool]:
    """Options that the recipe gives: name -> value."""
    return {option_name(name): value if isinstance(value, bool) else str(value) for name, value in vllm.args.items()}


def as_option(name: str, value: str | bool) -> str:
    """One option of the command line."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
