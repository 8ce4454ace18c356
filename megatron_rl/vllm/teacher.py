"""One start of a replica that holds the teacher in vLLM: this process, the front, starts `vllm serve` on published
weights, and passes on the log-probs of prompts."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from megatron_rl.config import RunConfig, read_config
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.codes import DRAINED
from megatron_rl.contract.paths import Replica, RunDir
from megatron_rl.distill.replicas import ROWS
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.replicas.wire import PROTOCOL, digest_of, read_token
from megatron_rl.metrics.timeline import Timeline
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.hf_config import CONFIG_FILE, read_hf_config, shape
from megatron_rl.model.hub import local_folder
from megatron_rl.rank.activity import Activity
from megatron_rl.rank.drain import DrainListener
from megatron_rl.rank.world import World
from megatron_rl.replica.scoring import scoring_application
from megatron_rl.replica.serve import answering, recorded, until_run_is_over
from megatron_rl.server.engine_thread import EngineGone
from megatron_rl.vllm.client import VllmClient
from megatron_rl.vllm.command import Served, Sizes, seed_of, teacher_command, vllm_environment
from megatron_rl.vllm.plugin import write_version
from megatron_rl.vllm.private_folder import private_folder
from megatron_rl.vllm.process import VllmClosed, VllmGone, VllmProcess, VllmRefused
from megatron_rl.vllm.start import started, version_in

PREFILL_TOKENS = 2048
"""Tokens computed at once. vLLM computes the logits of all of them together, 4 bytes per entry of the vocabulary."""


def run_teacher(
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

    Raises ConfigurationError if vLLM cannot hold the teacher here, and VllmGone if it has ended.
    """
    config = read_config(run_dir)
    if world.size != 1:
        raise ConfigurationError(f"a replica with vLLM is one process, but this one has {world.size}")
    found = version_in(sys.executable, os.environ)
    digest, token = digest_of(run_dir.resolved), read_token(run_dir.token)
    weights, sizes = _weights(config)
    drain.started()

    def goes_on() -> bool:
        activity.beat()
        return not drain.asked

    with private_folder() as folder:
        served = Served(weights, folder)
        write_version(served.plugins, found)
        command = teacher_command(
            config, served, sizes, sys.executable, seed_of(config, replica.attempt.number, replica.number, start)
        )
        environment = vllm_environment(
            os.environ, served, cpu=config.job.device == "cpu", step_limit_s=config.job.silence_limit_s
        )
        # The token that follows a sequence of full length needs no position.
        environment["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
        activity.enter("starting vLLM", 0)
        with started(command, environment, served, sys.stdout, "distill.replicas.vllm.args", goes_on) as process:
            if process is None:
                return DRAINED
            activity.enter("serving", 0)
            address = ReplicaAddress(replica.number, start, "", 0, sizes.tp, digest, PROTOCOL, time.time())
            vocabulary = sizes.model.vocab_size or 0
            scores = Scores(VllmClient(served.socket), process, activity, _answer_limit_s(config), vocabulary)
            return asyncio.run(_serve(scores, token, replica, address, drain))


def _weights(config: RunConfig) -> tuple[Path, Sizes]:
    """Return the folder of the teacher's weights, and the sizes of the vLLM that holds them. Raises
    ConfigurationError."""
    assert config.distill is not None and config.teacher_replicas is not None
    try:
        folder = local_folder(config.distill.teacher, "distill.teacher", CONFIG_FILE)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    model = ModelConfig(**shape(read_hf_config(folder)), init="from-scratch", dtype=config.model.dtype)
    sizes = Sizes(
        model=model,
        cpu=config.job.device == "cpu",
        tp=config.teacher_replicas.tp,
        longest=config.sequence_length + 1,
        rows=ROWS,
        prefill_tokens=PREFILL_TOKENS,
        splits=True,
    )
    return folder.absolute(), sizes


def _answer_limit_s(config: RunConfig) -> float:
    assert config.teacher_replicas is not None
    return config.teacher_replicas.answer_limit_s


async def _serve(scores: Scores, token: str, replica: Replica, address: ReplicaAddress, drain: DrainListener) -> str:
    async with answering(scoring_application(scores.score, token), replica, address):
        await until_run_is_over(replica, drain, scores.alive)
    await scores.close()
    return recorded(replica, drain)


class Scores:
    """Log-probs of prompts by one vLLM."""

    def __init__(
        self, client: VllmClient, process: VllmProcess, activity: Activity, limit_s: float, vocabulary: int
    ) -> None:
        """
        limit_s: seconds that the log-probs of one prompt may take.
        vocabulary: entries of the teacher's.
        """
        self._client, self._process, self._activity, self._limit_s = client, process, activity, limit_s
        self._vocabulary = vocabulary
        self._open = 0

    async def score(self, tokens: list[int]) -> list[float]:
        """Implement `replica.scoring.Score`."""
        if (largest := max(tokens)) >= self._vocabulary:  # without a tokenizer vLLM accepts it, and its engine ends
            raise ValueError(f"token {largest} is none of the teacher's, which has {self._vocabulary}")
        self._open += 1
        try:
            found = await self._client.score(tokens, self._limit_s)
        except (VllmRefused, VllmGone) as error:
            of_request = isinstance(error, VllmRefused) and error.status < 500
            raise (ValueError if of_request else EngineGone)(str(error)) from error
        finally:
            self._open -= 1
        self._activity.beat()
        return found

    async def alive(self) -> None:
        """Give a sign of life if vLLM has nothing to do and its workers react; while it computes, its answers are one.
        Raises VllmGone if it has ended."""
        self._process.check()
        if self._open:
            return
        try:
            await self._client.reach_workers()
        except VllmClosed as error:
            raise VllmGone(self._process.explained(str(error))) from error
        except VllmGone:
            return  # the host side ends a replica that stays silent
        self._activity.beat()

    async def close(self) -> None:
        await self._client.close()
