"""vLLM behind a replica: this process, the front, starts `vllm serve`, gives it the requests and weights of the run,
and is the only one that reaches it.

A front whose vLLM has its devices to itself starts it first, and then answers the run. One beside training ranks
answers at once, and starts it when the ranks have left the devices.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_rl.generate.engine.request_limits import RequestLimits
from megatron_rl.generate.refit.epoch import DEVICE
from megatron_rl.generate.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.lifecycle import RankWork, ReplicaRank
from megatron_rl.generate.vllm import cpu_choices
from megatron_rl.generate.vllm.command import DTYPES, Served, VllmMember, replica_command, seed_of, vllm_environment
from megatron_rl.generate.vllm.members import following, met
from megatron_rl.generate.vllm.plugin import write_plugin, write_version
from megatron_rl.generate.vllm.private_folder import private_folder
from megatron_rl.generate.vllm.returned_choices import returned_form
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.generate.vllm.staged_weights import StagedWeights
from megatron_rl.generate.vllm.start import VllmStart, version_here
from megatron_rl.generate.vllm.streams import Streams
from megatron_rl.generate.vllm.vllm_leader import VllmLeader
from megatron_rl.generate.vllm.vllm_turns import VllmTurns
from megatron_rl.model.platform.gpu_calls import offered
from megatron_rl.model.tokenizer import HuggingFaceTokenizer, Tokenizer, build_tokenizer
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.device_turns import sleeps
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.hf_config import CONFIG_FILE, to_hf_config
from megatron_rl.recipe.inference import pages_of
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.vllm_releases import release_of


@contextmanager
def open_policy(here: ReplicaRank) -> Iterator[RankWork]:
    """Open a vLLM that waits for the weights of the run. Raises ConfigurationError, also if no vLLM that was tried is
    here, and VllmGone if it has ended."""
    config, replica = here.config, here.replica
    version = version_here(config.inference.own_vllm)
    release = release_of(version)
    beside = config.shares_devices
    workers = config.placement.gpus_per_replica
    if here.world.size != (nodes := -(-workers // config.job.gpus_per_node)):
        raise ConfigurationError(
            f"a replica has {workers} GPUs on {nodes} node{'s' * (nodes > 1)}, one process on each, but this one has "
            f"{here.world.size} processes"
        )
    gpus = config.job.device == "cuda"
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    form = returned_form(config)
    profiled = {}
    if config.profile is not None:
        steps, updates = config.profile.steps_of_replica(replica.number, 0), config.grpo.updates_per_step
        profiled = {(step - 1) * updates: f"{replica.role}.step-{step:06d}" for step in steps}

    member = met(here, config.placement.inference.dp)

    def command(folder: Path, seed: int) -> tuple[Served, Sequence[str]]:
        served = Served(write_served_model(config.model, tokenizer.vocab_size, folder / "model"), folder)
        if isinstance(tokenizer, HuggingFaceTokenizer) and not _no_forms(config):
            tokenizer.save(served.model)
        write_plugin(served.plugins)
        traces = replica.attempt.profile if profiled else None
        return served, replica_command(config, served, sys.executable, release, seed, traces, member)

    further = MappingProxyType(_variables(config, member))
    if here.world.rank > 0:
        with (
            prepared(here, version, command, "inference.vllm.args", further) as start,
            following(here, start) as follows,
        ):
            yield follows
        return
    with opened_vllm(here, version, command, "inference.vllm.args", further, at_once=not beside) as vllm:
        if vllm is None:
            yield None
            return
        most_samples = config.inference.max_batch if release.streams_several else 1
        streams, setting = Streams(vllm, tokenizer, most_samples, form), _setting(here, tokenizer)
        order: VllmTurns | StagedWeights
        if beside:
            order = VllmTurns(vllm, streams, setting, sleeps=sleeps(config.offload), sleeps_again=release.sleeps_again)
        else:
            order = StagedWeights(vllm, streams, setting, holds=gpus and workers > 1)
        leader = VllmLeader(vllm, _limits(config, tokenizer), streams, order, profiled)
        transport = DEVICE if beside else offered("nccl" if gpus else "gloo")
        yield ReplicaService(leader, here.address(workers, transport), here.token)


def _variables(config: RunConfig, member: VllmMember | None) -> dict[str, str]:
    found = {} if member is None else {"VLLM_HOST_IP": member.address}
    if returned_form(config) and config.job.device == "cpu":
        found[cpu_choices.VARIABLE] = "1"
    return found


@contextmanager
def opened_vllm(
    here: ReplicaRank,
    version: str,
    command: Callable[[Path, int], tuple[Served, Sequence[str]]],
    args_key: str,
    further: MappingProxyType[str, str] = MappingProxyType({}),
    *,
    at_once: bool = True,
) -> Iterator[RunningVllm | None]:
    """Prepare a vLLM, which ends with the context. None if the replica is asked to leave before it has started.

    Args:
        version: of the vLLM in this Python.
        command: returns paths of a vLLM and its command, given its private folder and its seed.
        args_key: key of the options that the recipe adds.
        further: variables of its environment.
        at_once: whether to start it, and wait until it answers.

    Raises ConfigurationError if vLLM refuses its options, and VllmGone.
    """
    config, activity = here.config, here.activity

    def goes_on() -> bool:
        activity.beat()
        return not here.drain.asked

    with prepared(here, version, command, args_key, further) as start:
        vllm = RunningVllm(start, activity, config.job.silence_limit_s)
        try:
            if at_once:
                activity.enter("starting vLLM", 0)
                asyncio.run(vllm.start(goes_on))
            yield vllm if vllm.up or not at_once else None
        finally:
            vllm.end()


@contextmanager
def prepared(
    here: ReplicaRank,
    version: str,
    command: Callable[[Path, int], tuple[Served, Sequence[str]]],
    args_key: str,
    further: MappingProxyType[str, str] = MappingProxyType({}),
) -> Iterator[VllmStart]:
    """Yield what starts vLLM on this node, in a private folder that ends with the context."""
    config = here.config
    here.drain.started()
    with private_folder() as folder:
        seed = seed_of(config, here.replica.attempt.number, here.replica.number, here.number)
        served, words = command(folder, seed)
        write_version(served.plugins, version)
        environment = further | vllm_environment(
            os.environ, served, cpu=config.job.device == "cpu", step_limit_s=config.job.silence_limit_s
        )
        yield VllmStart(words, environment, served, sys.stdout, args_key)


def write_served_model(model: ModelConfig, vocabulary: int, folder: Path) -> Path:
    """Write the configuration on which vLLM starts with `--load-format dummy --skip-tokenizer-init`: the run sends the
    weights, and tokens are text outside vLLM.

    It is made from the recipe's model and never copied from published files, whose generation_config.json vLLM would
    apply.

    Args:
        vocabulary: tokens of the tokenizer. Training normalises log-probs over these, without rows that published
            weights have beyond them.
        folder: is created; a configuration in it is replaced.

    Returns the folder. Raises ConfigurationError if transformers has no such model, and OSError.
    """
    described = to_hf_config(model.model_copy(update={"vocab_size": vocabulary}), DTYPES[model.dtype])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    return folder


def _limits(config: RunConfig, tokenizer: Tokenizer) -> RequestLimits:
    longest = config.sequence_length
    pages, page_tokens = pages_of(config.inference, config.page_tokens, longest)
    return RequestLimits(
        tokenizer.vocab_size,
        longest,
        "training.sequence_length",
        pages * page_tokens,
        finds_stops=True,
        no_forms=_no_forms(config),
    )


def _no_forms(config: RunConfig) -> str:
    """Return the value of `RequestLimits.no_forms`."""
    vllm = config.inference.own_vllm
    return "" if vllm is not None and vllm.forms else "the run's vLLM forces none; set inference.vllm.forms=true"


def _setting(here: ReplicaRank, tokenizer: Tokenizer) -> dict[str, Any]:
    config = here.config
    timeout_s = min(config.job.collective_timeout_s, TRANSFER_TIMEOUT.total_seconds())
    return {
        "replica": here.replica.number,
        "start": here.number,
        "timeout_s": timeout_s,
        "model": config.model.model_dump(mode="json"),
        "vocabulary": tokenizer.vocab_size,
    }
