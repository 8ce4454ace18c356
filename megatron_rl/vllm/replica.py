"""One start of an inference replica that generates with vLLM: this process, the front, starts `vllm serve`, gives it
the requests and weights of the run, and is the only one that reaches it."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import pages_of
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.inference.request_limits import RequestLimits
from megatron_rl.inference.vllm_options import untried
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.tokenizer import Tokenizer, build_tokenizer
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.world import World
from megatron_rl.refit.replica_control import TRANSFER_TIMEOUT
from megatron_rl.replica.serve import serve
from megatron_rl.vllm.client import VllmClient
from megatron_rl.vllm.command import Served, seed_of, vllm_command, vllm_environment
from megatron_rl.vllm.leader import VllmLeader
from megatron_rl.vllm.plugin import vllm_version, write_metadata
from megatron_rl.vllm.process import VllmGone, VllmProcess
from megatron_rl.vllm.served_model import write_served_model

logger = logging.getLogger("megatron_rl")

START_LIMIT_S = 1800.0
"""Seconds that vLLM has to start: compiling and recording its graphs for a large model takes minutes."""
POLL_S = 0.5
"""Seconds between two checks whether vLLM has started."""


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
    if (found := vllm_version()) is None:
        raise ConfigurationError(f"{sys.executable} has no vLLM: set inference.vllm.python, or inference.vllm.image")
    if why := untried(found):
        raise ConfigurationError(why)
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    tp = config.placement.inference.tp or config.placement.training.tp
    try:
        tokenizer = build_tokenizer(config.tokenizer)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    drain.started()
    with tempfile.TemporaryDirectory(prefix="mrl-vllm-") as temporary:  # for this user alone
        folder = Path(temporary)
        model = write_served_model(config.model, tokenizer.vocab_size, folder / "model")
        served = Served(model, folder / "socket", folder / "plugins")
        write_metadata(served.plugins)
        command = vllm_command(
            config, served, sys.executable, seed_of(config, replica.attempt.number, replica.number, start)
        )
        environment = vllm_environment(
            os.environ, served, cpu=config.job.device == "cpu", step_limit_s=config.job.silence_limit_s
        )
        logger.info("starting vLLM: %s", shlex.join(command))
        process = VllmProcess(command, environment, sys.stdout)
        try:
            activity.enter("starting vLLM", 0)
            if not asyncio.run(_started(process, served.socket, activity, lambda: drain.asked)):
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
                holds=config.job.device == "cuda" and tp > 1,
            )
            address = ReplicaAddress(replica.number, start, "", 0, tp, digest, PROTOCOL, time.time())
            try:
                return asyncio.run(serve(config, replica, address, leader, token, drain))
            finally:
                leader.close()
        finally:
            process.end()


async def _started(process: VllmProcess, socket: Path, activity: Activity, leaves: Callable[[], bool]) -> bool:
    """Wait until vLLM answers. Returns false if this process was asked to leave before. Raises VllmGone if vLLM ends,
    or takes too long."""
    began = time.monotonic()
    client = VllmClient(socket)
    try:
        while not (socket.exists() and await client.healthy()):
            process.check()
            if leaves():
                return False
            if time.monotonic() - began > START_LIMIT_S:
                raise VllmGone(f"vLLM did not answer within {START_LIMIT_S:.0f} s")
            activity.beat()
            await asyncio.sleep(POLL_S)
    finally:
        await client.close()
    logger.info("vLLM has started in %.0f s", time.monotonic() - began)
    return True


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
        "backend": "nccl" if config.job.device == "cuda" else "gloo",
        "timeout_s": timeout_s,
        "model": config.model.model_dump(mode="json"),
        "vocabulary": tokenizer.vocab_size,
    }
