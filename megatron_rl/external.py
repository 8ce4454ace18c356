"""Generation by a server that was started apart from the run (`inference.engine: server`), as the ranks that train see
it: they write weights, have the server read them, and ask it for answers."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_rl.config import RunConfig
from megatron_rl.errors import ConfigurationError
from megatron_rl.generation import Generation
from megatron_rl.inference.config import ServerConfig
from megatron_rl.inference.served import ServedPolicy, endpoint_of
from megatron_rl.model.hf_config import CONFIG_FILE
from megatron_rl.model.hub import local_folder
from megatron_rl.model.policy import Policy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.refit.external import ExternalRefit, ServerReload
from megatron_rl.refit.served_folder import ServedFolder, ServerAway
from megatron_rl.rollout.apart import AgentThread, TrainingDriver
from megatron_rl.rollout.generation import AgentLoop, DriverPlace, complete

logger = logging.getLogger("megatron_rl")

LOOK_AGAIN_S = 1.0
"""Between two tries to reach a server that is away."""
TELL_EVERY_S = 30.0

Result = TypeVar("Result")


class AskedToLeave(Exception):
    """A rank was asked to leave while a server is waited for."""


class ServerRefit:
    """Implements `Refit`: the server has read the weights, and every driver knows the version."""

    starved = False
    """Whether what was asked waits for weights that nobody has. The server has always some."""

    def __init__(self, refit: ExternalRefit, served: ServedPolicy) -> None:
        self._refit, self._served = refit, served

    @property
    def moved_bytes(self) -> int:
        return self._refit.moved_bytes

    def publish(self, policy_version: int) -> None:
        """See `Refit.publish`. Where the ranks are asked to leave while the server is away, they do so at the next safe
        point: the step that led to these weights is done, and is recorded first. Raises ReloadFailed."""
        with suppress(AskedToLeave):
            self._refit.publish(policy_version)
        self._served.policy_version = policy_version

    def finish(self) -> None:
        """See `Refit.finish`: it is."""

    def renew(self) -> None:
        """See LastingLoop.feed: nothing is starved."""


class ServerLoop(AgentLoop):
    """Agents alone; a server answers."""

    def __init__(self, place: DriverPlace, groups: Groups, safe_points: SafePoints, runner: asyncio.Runner) -> None:
        super().__init__(place, safe_points, runner)
        self._groups = groups

    def run(self, work: Callable[[], Coroutine[Any, Any, Result]], sign_of_life: Callable[[], object]) -> Result | None:
        """See AgentLoop.run: nothing where a rank was asked to leave before, since others might wait for a server that
        is away. Collective over all ranks."""
        result = None
        if not self._any(self._safe_points.poll()) and self._place.drives:
            result = complete(self._runner, self._safe_points.run_until_asked(work(), sign_of_life))
        self._any(False)
        return result

    def _any(self, flag: bool) -> bool:
        """Whether it is so on any rank. Collective."""
        found = torch.tensor([flag], dtype=torch.int32)
        with self._safe_points.phase("wait"):
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._groups.control)
        return bool(found.item())


class Patience:
    """Waits for a server that is away, on all ranks alike."""

    def __init__(self, safe_points: SafePoints, groups: Groups, start: str, limit_s: float) -> None:
        """
        start: what starts the server.
        limit_s: that it may be away.
        """
        self._safe_points, self._groups = safe_points, groups
        self._start, self._limit_s = start, limit_s
        self._since: float | None = None
        self._told = self._asked = 0.0  # when it was

    def wait(self, away: ServerAway) -> None:
        """Before it is asked again. Raises AskedToLeave where a rank is, and ServerAway where that was long enough.
        Collective."""
        now = time.monotonic()
        if self._since is None or now - self._asked > TELL_EVERY_S:  # it was there in between
            self._since = now
        self._asked = now
        if now - self._told > TELL_EVERY_S and dist.get_rank() == 0:
            logger.warning("waiting for the server, which %s starts: %s", self._start, away)
            self._told = now
        flags = torch.tensor([self._safe_points.poll(), now - self._since > self._limit_s], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._groups.control)
        asked, too_long = flags.bool().tolist()
        if asked:
            raise AskedToLeave
        if too_long:
            raise ServerAway(f"no server for {self._limit_s:.0f} s (job.silence_limit_s): {away}")
        time.sleep(LOOK_AGAIN_S)


def generate_by_server(
    policy: Policy, config: RunConfig, tokenizer: Tokenizer, groups: Groups, safe_points: SafePoints
) -> Generation:
    """A server, which answers by the weights of `policy` once they are published. Collective.

    Raises ConfigurationError where what it is to be told is not there.
    """
    server, model = config.inference.server, config.model
    assert server is not None and model.huggingface is not None  # checked by the configuration
    try:
        published = local_folder(model.huggingface, "model.huggingface", CONFIG_FILE)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    limit_s = config.job.silence_limit_s
    endpoint = endpoint_of(server, limit_s)
    served, folder = ServedPolicy(endpoint, tokenizer), ServedFolder(Path(server.folder).expanduser(), published)
    patience = Patience(safe_points, groups, start_of(server, folder), limit_s)
    reload = ServerReload(served, endpoint, server.kind, folder)
    refit = ServerRefit(ExternalRefit(policy, model, reload, folder, groups.control, patience.wait), served)
    place, runner = TrainingDriver.of(groups), asyncio.Runner()
    loop = ServerLoop(place, groups, safe_points, runner)
    return Generation(served, refit, place, loop, partial(AgentThread, place, refit), loop.close)


def start_of(server: ServerConfig, folder: ServedFolder) -> str:
    """A command that starts such a server, for people."""
    current, name = shlex.quote(str(folder.current)), shlex.quote(server.model)
    if server.kind == "mrl":
        return f"`mrl serve {current} --weights-from {shlex.quote(str(folder.folder))} --name {name}`"
    processed = " --logprobs-mode processed_logprobs" if server.processed_logprobs else ""
    return f"`VLLM_SERVER_DEV_MODE=1 vllm serve {current} --served-model-name {name}{processed}`"
