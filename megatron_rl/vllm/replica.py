"""One start of an inference replica that generates with vLLM: this process, the front, starts `vllm serve`, gives it
the requests and weights of the run, and is the only one that reaches it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import pages_of
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.inference.request_limits import RequestLimits
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.platform.transport import offered
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.world import World
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.replica.serve import serve
from megatron_rl.vllm.client import CONTROL_S, VllmClient
from megatron_rl.vllm.command import Served, replica_command, seed_of, vllm_environment
from megatron_rl.vllm.leader import VllmLeader
from megatron_rl.vllm.plugin import write_plugin, write_version
from megatron_rl.vllm.private_folder import private_folder
from megatron_rl.vllm.served_model import write_served_model
from megatron_rl.vllm.start import started, version_in


def run_replica(
    run_dir: RunDir,
    replica: Replica,
    start: int,
    world: World,
    activity: Activity,
    drain: DrainListener,
    timeline: Timeline,
) -> str:
    """Run the front from start to exit. Returns FINISHED or DRAINED, after it has written the outcome.

    start: number of earlier starts of this replica in this attempt.
    """
    config = read_config(run_dir)
    if world.size != 1:
        raise ConfigurationError(f"a replica with vLLM is one process, but this one has {world.size}")
    found = version_in(sys.executable, os.environ)
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    tp = config.placement.inference.tp or config.placement.training.tp
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    drain.started()

    def goes_on() -> bool:
        activity.beat()
        return not drain.asked

    profiled = {}
    if config.profile is not None:
        steps, updates = config.profile.steps_of_replica(replica.number, 0), config.grpo.updates_per_step
        profiled = {(step - 1) * updates: f"{replica.role}.step-{step:06d}" for step in steps}
    with private_folder() as folder:
        served = Served(write_served_model(config.model, tokenizer.vocab_size, folder / "model"), folder)
        write_plugin(served.plugins)
        write_version(served.plugins, found)
        command = replica_command(
            config,
            served,
            sys.executable,
            seed_of(config, replica.attempt.number, replica.number, start),
            replica.attempt.profile if profiled else None,
        )
        environment = vllm_environment(
            os.environ, served, cpu=config.job.device == "cpu", step_limit_s=config.job.silence_limit_s
        )
        activity.enter("starting vLLM", 0)
        with started(command, environment, served, sys.stdout, "inference.vllm.args", goes_on) as process:
            if process is None:
                return DRAINED
            activity.enter("serving", 0)
            leader = VllmLeader(
                process,
                VllmClient(served.socket),
                _limits(config, tokenizer),
                tokenizer.end_ids,
                tokenizer.decode,
                activity,
                _setting(config, replica, start, tokenizer),
                config.inference.max_batch,
                min(CONTROL_S, config.job.silence_limit_s),
                holds=config.job.device == "cuda" and tp > 1,
                profiled=profiled,
            )
            transport = offered("nccl" if config.job.device == "cuda" else "gloo")
            address = ReplicaAddress(replica.number, start, "", 0, tp, digest, PROTOCOL, time.time(), transport)
            try:
                return asyncio.run(serve(config, replica, address, leader, token, drain))
            finally:
                leader.close()


def _limits(config: RunConfig, tokenizer: Tokenizer) -> RequestLimits:
    longest = config.sequence_length
    pages, page_tokens = pages_of(config.inference, config.page_tokens, longest)
    return RequestLimits(
        tokenizer.vocab_size, longest, "training.sequence_length", pages * page_tokens, finds_stops=True
    )


def _setting(config: RunConfig, replica: Replica, start: int, tokenizer: Tokenizer) -> dict[str, Any]:
    timeout_s = min(config.job.collective_timeout_s, TRANSFER_TIMEOUT.total_seconds())
    return {
        "replica": replica.number,
        "start": start,
        "timeout_s": timeout_s,
        "model": config.model.model_dump(mode="json"),
        "vocabulary": tokenizer.vocab_size,
    }
