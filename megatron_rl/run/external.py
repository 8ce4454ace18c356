"""Generation by servers that the run did not start (`inference.engine: server`): the training ranks write weights, and
the servers read them and answer requests."""

from __future__ import annotations

import logging
import shlex
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.contract.paths import RunDir
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.config import ServerConfig
from megatron_rl.inference.served import ServedPolicy, endpoints_of
from megatron_rl.model.hf_config import CONFIG_FILE
from megatron_rl.model.hub import local_folder
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.external import ExternalRefit, ServerReload
from megatron_rl.refit.folder_owner import claim, identity_of
from megatron_rl.refit.prober import Prober
from megatron_rl.refit.served_folder import ServedFolder, ServerAway
from megatron_rl.rollout.agent_loop import AgentThread, TrainingDriver
from megatron_rl.run.generation import Generation

logger = logging.getLogger("megatron_rl")

RETRY_EVERY_S = 1.0
"""Seconds between two attempts to reach a server that is away."""
WARN_EVERY_S = 30.0
"""Seconds between two warnings that a server is away."""


class AskedToLeave(Exception):
    """A rank was asked to leave while the ranks wait for a server."""


class ServerRefit:
    """Implements `Refit`: when `publish` returns, the servers have read the weights, and every driver knows it."""

    starved = False
    """Whether requests wait for weights. The server always has some."""

    def __init__(self, refit: ExternalRefit, served: ServedPolicy) -> None:
        self._refit, self._served = refit, served

    @property
    def moved_bytes(self) -> int:
        return self._refit.moved_bytes

    def publish(self, policy_version: int) -> None:
        """Publish a version. Ranks that are asked to leave while the server is away leave at the next safe point, after
        they have recorded the step that led to these weights. Raises ReloadFailed."""
        with suppress(AskedToLeave):
            self._refit.publish(policy_version)
        self._served.policy_version = policy_version

    def finish(self) -> None:
        """Return at once: `publish` has finished."""

    def renew(self) -> None:
        """Return at once: nothing is starved."""


class ServerWait:
    """Wait of all ranks for a server that is away."""

    def __init__(self, safe_points: SafePoints, groups: Groups, start: str, limit_s: float) -> None:
        """
        start: command that starts the server, for the message.
        limit_s: seconds that the server may be away.
        """
        self._safe_points, self._groups = safe_points, groups
        self._start, self._limit_s = start, limit_s
        self._since: float | None = None
        self._warned_at = self._asked_at = 0.0  # monotonic

    def wait(self, away: ServerAway) -> None:
        """Wait before the next attempt. Collective. Raises AskedToLeave if a rank is asked to leave, and
        ServerAway after the limit."""
        now = time.monotonic()
        if self._since is None or now - self._asked_at > WARN_EVERY_S:  # it was back in between
            self._since = now
        self._asked_at = now
        if now - self._warned_at > WARN_EVERY_S and dist.get_rank() == 0:
            logger.warning("waiting for the server, which %s starts: %s", self._start, away)
            self._warned_at = now
        flags = torch.tensor([self._safe_points.poll(), now - self._since > self._limit_s], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._groups.control)
        asked, too_long = flags.bool().tolist()
        if asked:
            raise AskedToLeave
        if too_long:
            raise ServerAway(f"no server for {self._limit_s:.0f} s (job.silence_limit_s): {away}")
        time.sleep(RETRY_EVERY_S)


def generate_by_server(
    policy: Policy,
    config: RunConfig,
    tokenizer: Tokenizer,
    groups: Groups,
    safe_points: SafePoints,
    run_dir: RunDir,
    prober: Prober | None,
) -> Generation:
    """Connect to servers, which generate with the weights of `policy` once they are published. Collective.

    prober: of the servers, if they are probed.

    Raises ConfigurationError if the files of `model.huggingface` are missing, or another run owns the folder.
    """
    server, model = config.inference.server, config.model
    assert server is not None and model.huggingface is not None  # checked by the configuration
    try:
        published = local_folder(model.huggingface, "model.huggingface", CONFIG_FILE)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    limit_s = config.job.silence_limit_s
    endpoints = endpoints_of(server, processed_logprobs=server.processed_logprobs)
    served = ServedPolicy(endpoints, tokenizer, limit_s)
    folder = ServedFolder(Path(server.folder).expanduser(), published)
    claim_folder(folder, run_dir, groups.control)
    wait = ServerWait(safe_points, groups, start_of(server, folder), limit_s)
    reloads = [ServerReload(each, folder) for each in endpoints]
    external = ExternalRefit(policy, model, reloads, folder, groups.control, wait.wait, prober)
    refit = ServerRefit(external, served)

    def metrics() -> dict[str, float]:
        return {} if prober is None else {"time/probe_s": prober.seconds}

    loop = AgentThread(TrainingDriver.of(groups), served, safe_points, refit)
    return Generation(served, refit, loop, metrics=metrics if dist.get_rank() == 0 else dict)


def claim_folder(served: ServedFolder, run_dir: RunDir, control: dist.ProcessGroup) -> None:
    """Own the folder for this run as long as this process lives, and beyond that until the run has finished.
    Collective. Raises ConfigurationError on all ranks."""
    refusal: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            served.own()
            claim(served.folder, identity_of(run_dir))
        except (OSError, ConfigurationError) as error:
            refusal = [str(error)]
    dist.broadcast_object_list(refusal, group_src=0, group=control)
    if refusal[0] is not None:
        raise ConfigurationError(refusal[0])


def start_of(server: ServerConfig, folder: ServedFolder) -> str:
    """Return a command line that starts such a server."""
    current, name = shlex.quote(str(folder.current)), shlex.quote(server.model)
    if server.kind == "mrl":
        return f"`mrl serve {current} --weights-from {shlex.quote(str(folder.folder))} --name {name}`"
    if server.kind == "sglang":
        return f"`python -m sglang.launch_server --model-path {current} --served-model-name {name}`"
    processed = " --logprobs-mode processed_logprobs" if server.processed_logprobs else ""
    options = f"--served-model-name {name} --generation-config vllm{processed}"
    return f"`VLLM_SERVER_DEV_MODE=1 vllm serve {current} {options}`"
