"""Pure: the command of `vllm serve`, for a replica or an evaluation, and its environment."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.contract.files import compiler_cache
from megatron_rl.contract.paths import REWARD
from megatron_rl.generate.vllm.client import MODEL_NAME
from megatron_rl.generate.vllm.plugin import BACKEND
from megatron_rl.generate.vllm.returned_choices import returned_form
from megatron_rl.recipe.cache_sizes import cache_bytes
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_turns import sleeps
from megatron_rl.recipe.inference import processes_logprobs
from megatron_rl.recipe.job import PLANS
from megatron_rl.recipe.layer_sizes import replica_layers
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.vllm import VllmConfig
from megatron_rl.recipe.vllm_options import given_options, option_word
from megatron_rl.recipe.vllm_releases import VllmRelease

LARGEST_BLOCK = 128
"""Tokens of a block of vLLM's cache on a CPU, which holds only one sequence; on GPUs it has fewer."""
STEP_LIMIT_S = 1800
"""Seconds of one step of the model; vLLM's own 300 are too few for a long prefill on a busy CPU."""
STREAM_INTERVAL = 16
"""Tokens of an answer in one message: each message costs vLLM and the front about 0.1 ms."""
AT_ONCE = 1
"""The same if tokens get their version when they arrive. Others would wait in vLLM while weights are swapped."""
WORLD_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables of the front's own world, which vLLM's workers would mistake for theirs."""
ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
EXPANDABLE = "expandable_segments"
"""Setting of torch's allocator that the ranks may have, as with the shipped profile of H100s. vLLM's own all-reduce
hands out the memory of recorded graphs in a way that such segments do not have: with it, and tp above 1, its workers
exit with `custom_all_reduce.cuh: invalid argument`."""
SHARE_TO_START = "0.01"
"""Share of a GPU that must be free when a vLLM beside training ranks starts. vLLM demands `gpu-memory-utilization` of
it, also where the size of the cache is given and that option has no other effect; but the ranks' contexts,
communicators, and with `placement.offload` none or buffers their weights, are there too. `mrl plan` adds up what both
need."""
GUIDED = {"backend": "guidance"}
"""vLLM's guided decoding by llguidance, with which training computes the same masks: model/grammar.py."""
CPU_CACHE_BYTES = 2**30
"""Cache of a reward model on a CPU, which needs it for the texts of one step of the model."""
BYTES = {"fp32": 4, "bf16": 2}
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


Options = Mapping[str, str | bool]
"""Options by name, without the dashes in front. true gives one alone, false its opposite."""


@dataclass(frozen=True, slots=True)
class Served:
    model: Path
    """Folder with config.json. Prompts and answers are tokens, so vLLM needs the tokenizer's files for forms only."""
    folder: Path
    """Folder of this user alone, for sockets; see private_folder."""

    @property
    def socket(self) -> Path:
        return self.folder / "socket"

    @property
    def temporary(self) -> Path:
        return self.folder / "tmp"

    @property
    def plugins(self) -> Path:
        """Folder with the metadata of the plugin, see plugin."""
        return self.folder / "plugins"


@dataclass(frozen=True, slots=True)
class ServeSizes:
    model: ModelConfig
    cpu: bool
    tp: int
    longest: int
    """Tokens of a prompt and its answer together."""
    rows: int
    """Answers decoded at once."""
    prefill_tokens: int
    cache_tokens: int | None = None
    """Tokens of the cache; default: `rows` sequences of full length, and on GPUs of vLLM alone what is left
    of their memory."""
    page_tokens: int | None = None
    graphs: bool = True
    """Whether to record decode steps on GPUs."""
    beside_ranks: bool = False
    """Whether training ranks take turns with vLLM on its devices."""
    pp: int = 1
    dp: int = 1
    ep: int = 1
    short_cache: bool = False
    """Whether the cache has 8 bits."""
    splits: bool = False
    """Whether a prompt of more than `prefill_tokens` tokens is split, although nothing else is computed."""

    @property
    def step_tokens(self) -> int:
        return max(self.prefill_tokens, self.rows if self.splits else self.longest)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache of keys and values on each device."""
        block = self.page_tokens or LARGEST_BLOCK
        tokens = self.cache_tokens or self.rows * math.ceil(self.longest / block) * block
        size = 1 if self.short_cache else BYTES[self.model.dtype]
        stages = replica_layers(self.model.num_layers, self.pp)
        held = (cache_bytes(self.model, size, self.tp, self.longest, by_vllm=True, layers=one) for one in stages)
        return max(tokens * one.token + self.rows * one.sequence for one in held)


@dataclass(frozen=True, slots=True)
class VllmMember:
    """One node of a vLLM over several."""

    rank: int
    nodes: int
    address: str
    """Address of this node."""
    host: str
    """Address of the first node."""
    port: int
    """Port of the first node, where the workers meet."""
    engines_port: int | None
    """Port of the first node, where the engines of other data-parallel parts ask it; None: there is one part."""

    @property
    def options(self) -> dict[str, str | bool]:
        found: dict[str, str | bool] = {
            "nnodes": str(self.nodes),
            "node-rank": str(self.rank),
            "master-addr": self.host,
            "master-port": str(self.port),
        }
        if self.engines_port is not None:
            found |= {"data-parallel-address": self.host, "data-parallel-rpc-port": str(self.engines_port)}
        return found | ({"headless": True} if self.rank else {})


def serve_command(
    python: str,
    served: Served,
    sizes: ServeSizes,
    given: VllmConfig | None,
    further: Options,
    seed: int,
    member: VllmMember | None = None,
) -> list[str]:
    """The command of `vllm serve`. What follows from the sizes comes last, so it wins.

    Args:
        python: interpreter that has vLLM.
        given: settings of the recipe.
        further: options of this use of vLLM, which win over those of the recipe.
        seed: of the samples.
        member: the node, of several.
    """
    options = given_options((given or VllmConfig()).args)
    options |= {"skip-tokenizer-init": True, **further}
    options |= {
        "served-model-name": MODEL_NAME,
        "uds": str(served.socket),
        "enable-scale-out": True,
        "disable-uvicorn-access-log": True,
        "dtype": DTYPES[sizes.model.dtype],
        "max-model-len": str(sizes.longest),
        "max-num-seqs": str(sizes.rows),
        "max-num-batched-tokens": str(sizes.step_tokens),
        "tensor-parallel-size": str(sizes.tp),
        "generation-config": "vllm",
        "seed": str(seed),
    }
    options = {**options, **_split(sizes)}
    if member is not None:
        options = {**options, **member.options}
    if "headless" in options:  # without a server
        options = {name: value for name, value in options.items() if name not in ("uds", "api-server-count")}
    if sizes.cpu or not sizes.graphs:
        options["enforce-eager"] = True
    if sizes.page_tokens is not None:
        options["block-size"] = str(sizes.page_tokens)
    if sizes.beside_ranks and not sizes.cpu:
        options["gpu-memory-utilization"] = SHARE_TO_START
    if sizes.cpu or sizes.beside_ranks or sizes.cache_tokens is not None:
        options["kv-cache-memory-bytes"] = str(sizes.cache_bytes)
    return _serve(python, served, options)


def _split(sizes: ServeSizes) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {}
    if sizes.pp > 1:
        found["pipeline-parallel-size"] = str(sizes.pp)
    if sizes.dp > 1:  # by default vLLM starts a server for each part, and a pause would reach one of them
        found |= {"data-parallel-size": str(sizes.dp), "api-server-count": "1"}
    if sizes.ep > 1:
        found["enable-expert-parallel"] = True
    return found


def replica_command(
    config: RunConfig,
    served: Served,
    python: str,
    release: VllmRelease,
    seed: int,
    traces: Path | None = None,
    member: VllmMember | None = None,
) -> list[str]:
    """The command of a replica's `vllm serve`, which gets its weights from the run.

    Args:
        python: interpreter that has vLLM, of this release.
        seed: see seed_of.
        member: the node, of several.
        traces: folder for profiles; None: vLLM does not profile.
    """
    further: Options = {
        "scheduling-policy": "priority",  # lets the probe of new weights precede the answers
        "load-format": "dummy",
        "weight-transfer-config": json.dumps({"backend": BACKEND}),
        "enable-prefix-caching": config.inference.share_prefixes,
        "logprobs-mode": "processed_logprobs" if processes_logprobs(config.sampling) else "raw_logprobs",
        "stream-interval": str(STREAM_INTERVAL if release.reports_versions else AT_ONCE),
    }
    sizes = sizes_of(config)
    if sizes.beside_ranks and not sizes.cpu and sleeps(config.offload):  # vLLM refuses it on a CPU
        further = {**further, "enable-sleep-mode": True}
    if returned_form(config):
        further = {**further, "enable-return-routed-experts": True}
    if config.inference.own_vllm is not None and config.inference.own_vllm.forms:
        further = {**further, "skip-tokenizer-init": False, "structured-outputs-config": json.dumps(GUIDED)}
    if traces is not None:
        further = {**further, "profiler-config": json.dumps(profiler_config(traces))}
    return serve_command(python, served, sizes, config.inference.vllm, further, seed, member)


def profiler_config(traces: Path) -> dict[str, Any]:
    """The setting of vLLM's profiler of its workers, which VllmClient starts and stops.

    traces: folder.
    """
    return {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_record_shapes": True,
        "torch_profiler_with_stack": False,
        "max_iterations": PLANS,
        "ignore_frontend": True,  # its trace has no limit
    }


def teacher_command(config: RunConfig, served: Served, sizes: ServeSizes, python: str, seed: int) -> list[str]:
    """The command of `vllm serve` for the teacher, whose prompts it scores. seed: see seed_of."""
    further: Options = {
        "scheduling-policy": "priority",  # see VllmClient.score
        "logprobs-mode": "raw_logprobs",
        "enable-prefix-caching": False,  # a prompt to be scored is computed whole
    }
    divergences = [one.divergence for one in config.teachings.each if one.replicas is not None]
    if largest := max((one.top_k or 0 for one in divergences if one is not None), default=0):
        further = {**further, "max-logprobs": str(largest)}
    return serve_command(python, served, sizes, config.teacher_vllm, further, seed)


def classifier_command(config: RunConfig, served: Served, python: str, seed: int) -> list[str]:
    """The command of `vllm serve` for the reward model. It may be of any architecture, so vLLM reads its sizes from its
    own files.

    seed: see seed_of.
    """
    assert config.reward is not None
    replicas = config.reward.replicas
    options = given_options(config.started_vllms[REWARD].args)
    options |= {
        "runner": "pooling",
        "served-model-name": MODEL_NAME,
        "uds": str(served.socket),
        "disable-uvicorn-access-log": True,
        "dtype": DTYPES[config.model.dtype],
        "tensor-parallel-size": str(replicas.tp),
        "seed": str(seed),
    }
    if replicas.sequence_length is not None:
        options["max-model-len"] = str(replicas.sequence_length)
    if config.job.device == "cpu":
        options |= {"enforce-eager": True, "kv-cache-memory-bytes": str(CPU_CACHE_BYTES)}
    return _serve(python, served, options)


def _serve(python: str, served: Served, options: Options) -> list[str]:
    words = [option_word(name, value) for name, value in options.items()]
    return [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(served.model), *words]


def sizes_of(config: RunConfig) -> ServeSizes:
    inference, layout = config.inference, config.placement.inference
    return ServeSizes(
        model=config.model,
        cpu=config.job.device == "cpu",
        tp=layout.tp or config.placement.training.tp,
        pp=layout.pp,
        dp=layout.dp,
        ep=layout.ep,
        longest=config.sequence_length,
        rows=inference.max_batch,
        prefill_tokens=inference.prefill_tokens,
        cache_tokens=inference.cache_tokens,
        page_tokens=inference.page_tokens,
        graphs=inference.cuda_graphs,
        beside_ranks=config.shares_devices,
        short_cache=inference.own_vllm is not None and inference.own_vllm.precision.cache,
    )


def vllm_environment(
    environ: Mapping[str, str], served: Served, *, cpu: bool, step_limit_s: int = STEP_LIMIT_S
) -> dict[str, str]:
    """The environment of `vllm serve`, from that of the process that starts it.

    step_limit_s: seconds that a step of the model may take before vLLM ends itself.
    """
    found = {name: value for name, value in environ.items() if name not in WORLD_VARIABLES}
    for name in ALLOCATOR_VARIABLES & found.keys():
        settings = [each for each in found.pop(name).split(",") if not each.strip().startswith(EXPANDABLE)]
        found |= {name: ",".join(settings)} if settings else {}
    found["PYTHONPATH"] = ":".join([str(served.plugins), *filter(None, [environ.get("PYTHONPATH")])])
    ours = {
        "TMPDIR": str(served.temporary),
        "TORCHINDUCTOR_CACHE_DIR": environ.get("TORCHINDUCTOR_CACHE_DIR") or compiler_cache(),  # outlives vLLM
        "VLLM_RPC_BASE_PATH": str(served.folder),  # sockets between its processes, in /tmp by default
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
