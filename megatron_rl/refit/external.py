"""Refit of servers outside the run: every rank writes tensors to a folder, and rank 0 has the servers read it.

A server keeps its previous version until it has read the next one. If it refuses, `current` points back to the
previous version; if it is away, it reads the newest when it starts. Each version is probed on each server before it is
used. Servers reload by

    vllm    POST /pause?mode=keep, /collective_rpc {"method": "reload_weights"}, /reset_prefix_cache with the requests
            under way, whose keys and values belong to the old weights, /resume. Every worker reads the folder on which
            it was started. vLLM has these routes if it was started with VLLM_SERVER_DEV_MODE=1. They need no token, so
            only the trainer may reach the server.
    sglang  POST /pause_generation {"mode": "retract"}, /update_weights_from_disk, which also clears its cache,
            /continue_generation
    mrl     POST /update_weights {"version": ...}: it knows the folder, and swaps between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist

from megatron_rl.checkpoint.hf.staging import staged
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai import CONNECT_S, EndpointAway, EndpointError, authorization, root_of
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer
from megatron_rl.inference.served import inference_of
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.refit.probe import EngineProbes, Probe, ProbeFailed
from megatron_rl.refit.prober import Prober
from megatron_rl.refit.served_folder import ReloadFailed, ServedFolder, ServerAway, published_weights, whole_tensors

STARTING = {502, 503, 504}
"""HTTP statuses of a server that starts or stops, or of a proxy in front of it."""
_PAUSE: dict[str, tuple[str, dict[str, str] | None, str, dict[str, str] | None]] = {
    "vllm": ("/pause?mode=keep", None, "/resume", None),
    "sglang": ("/pause_generation", {"mode": "retract"}, "/continue_generation", {}),
}
"""How servers pause and resume: path and body of each."""


class ServerReload:
    """Has one server read versions that are already written."""

    def __init__(
        self, server: Endpoint, served: ServedFolder, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """
        server: its address; `timeout_s` bounds a reload.
        transport: for tests.
        """
        self._server, self._served, self._transport = server, served, transport
        self._has: int | None = None
        self._probes = EngineProbes()

    async def reload(self, version: int, probe: Probe | None = None) -> None:
        """Have the server read the version to which `current` points, and probe it. It reads a version once.

        Raises:
            ReloadFailed: the server refused, or samples by other weights.
            ServerAway: the server does not answer; try again.
        """
        if self._has == version:
            return
        self._has = None
        client = httpx.AsyncClient(
            base_url=root_of(self._server.url),
            headers=authorization(self._server.token_file, self._server.token_variable),
            timeout=httpx.Timeout(self._server.timeout_s, connect=CONNECT_S),
            limits=httpx.Limits(max_keepalive_connections=0),  # vLLM's server closes one after a call that fails
            trust_env=False,  # a proxy of the environment does not lead to the job's own nodes
            transport=self._transport,
        )
        async with client, self._paused(client):
            await self._read(client, version)
        if probe is not None:
            await self._check(version, probe)
        self._has = version

    @asynccontextmanager
    async def _paused(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """Pause the server's requests within the `with` block, if it does not do so itself."""
        if self._server.kind == "mrl":
            yield
            return
        pause, how, resume, then = _PAUSE[self._server.kind]
        await self._post(client, pause, how)
        try:
            yield
        except BaseException:
            with suppress(ReloadFailed):  # the first error counts
                await self._post(client, resume, then)
            raise
        await self._post(client, resume, then)

    async def _read(self, client: httpx.AsyncClient, version: int) -> None:
        if self._server.kind == "mrl":
            await self._post(client, "/update_weights", {"version": version})
        elif self._server.kind == "sglang":
            content = {"model_path": str(self._served.current), "weight_version": str(version), "flush_cache": True}
            await self._succeed(client, "/update_weights_from_disk", content)
        else:
            await self._post(client, "/collective_rpc", {"method": "reload_weights"})
            await self._succeed(client, "/reset_prefix_cache?reset_running_requests=true", None)

    async def _check(self, version: int, probe: Probe) -> None:
        asked = replace(self._server, attempts=1)
        try:
            async with inference_of(asked, transport=self._transport) as inference:
                self._probes.check(probe, await inference.score(probe.tokens))
        except ProbeFailed as error:
            raise ReloadFailed(
                f"{self._server.url} has read version {version}, but samples by other weights: {error}. It must be "
                f"started on {self._served.current}, with the trainer's dtype"
            ) from error
        except EndpointAway as error:
            raise ServerAway(str(error)) from error
        except (EndpointError, UnusableAnswer) as error:
            raise ReloadFailed(f"{self._server.url} cannot be probed: {error}") from error

    async def _post(self, client: httpx.AsyncClient, path: str, content: dict[str, Any] | None) -> httpx.Response:
        where = f"{client.base_url.join(path)}"
        try:
            response = await client.post(path, json=content)
        except httpx.TransportError as error:
            raise ServerAway(f"{where}: {error!r}") from error
        status = f"{where}: HTTP {response.status_code}: {response.text[:500]}"
        if response.status_code in STARTING:
            raise ServerAway(status)
        if self._server.kind == "vllm" and response.status_code == 404:
            raise ReloadFailed(f"{where} does not exist: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if not response.is_success:
            raise ReloadFailed(status)
        return response

    async def _succeed(self, client: httpx.AsyncClient, path: str, content: dict[str, Any] | None) -> None:
        """Post, and raise ReloadFailed also if the server reports in its response that it did not do what it was
        asked."""
        response = await self._post(client, path, content)
        try:
            done = response.json().get("success", True)
        except (ValueError, AttributeError):
            done = True
        if not done:
            raise ReloadFailed(f"{client.base_url.join(path)}: {response.text[:500]}")


async def reload_all(
    servers: Sequence[ServerReload], served: ServedFolder, version: int, probe: Probe | None = None
) -> None:
    """Have all servers read a version, at the same time, and delete the others.

    Raises:
        ReloadFailed: a server refused. Then `current` names the previous version.
        ServerAway: a server does not answer. Then `current` names this version; try again.
    """
    with served.pointing(version):
        of_servers = (each.reload(version, probe) for each in servers)
        failures = [each for each in await asyncio.gather(*of_servers, return_exceptions=True) if each is not None]
        failures.sort(key=lambda failure: isinstance(failure, ServerAway))  # a refusal before an absence
        if failures:
            raise failures[0]
    served.delete_others(version)


class ExternalRefit:
    """Implements `Refit` for servers outside the run."""

    def __init__(
        self,
        trained: Policy,
        model: ModelConfig,
        servers: Sequence[ServerReload],
        served: ServedFolder,
        control: dist.ProcessGroup,
        wait: Callable[[ServerAway], None] | None = None,
        prober: Prober | None = None,
    ) -> None:
        """
        control: all ranks, over gloo.
        wait: called on all ranks before a server that is away is tried again; raises if that took too long. None: an
            absent server is an error.
        prober: measures the probe of each version; None: versions are not probed.
        """
        self._trained = trained
        self._model = model
        self._servers = servers
        self._served = served
        self._control = control
        self._wait = wait
        self._prober = prober
        own = sum(held.tensor.nbytes for held in published_weights(trained, model))
        self.moved_bytes: int = sum(self._on_all_ranks(lambda: own))
        """Bytes that all ranks together write for a version."""

    def publish(self, policy_version: int) -> None:
        """Write the weights and have the servers read them. Collective.

        Raises ReloadFailed on all ranks if one of them failed; ServerAway, see `wait`.
        """
        leads = dist.get_rank(self._control) == 0
        probe = None if self._prober is None else self._prober.measure()
        with ExitStack() as stack:
            (folder, *_) = self._on_all_ranks(lambda: self._begin(stack, policy_version) if leads else None)
            of_ranks = self._on_all_ranks(lambda: self._write(Path(folder)))
            files = {name: file for each in of_ranks for name, file in each.items()}
            self._on_all_ranks(lambda: self._finish(stack, Path(folder), files, policy_version) if leads else None)
        while True:
            try:
                self._on_all_ranks(lambda: asyncio.run(self._reload(policy_version, probe)) if leads else None)
                return
            except ServerAway as away:
                if self._wait is None:
                    raise
                self._wait(away)

    def finish(self) -> None:
        """Nothing runs in the background."""

    async def _reload(self, version: int, probe: Probe | None) -> None:
        await reload_all(self._servers, self._served, version, probe)

    def _begin(self, stack: ExitStack, policy_version: int) -> str:
        self._served.own()
        target = self._served.version(policy_version)
        return str(stack.enter_context(staged(target, self.moved_bytes, replace=True)))

    def _write(self, folder: Path) -> dict[str, str]:
        tensors = whole_tensors(self._trained, self._model)
        try:
            return self._served.write(folder, dist.get_rank(self._control), tensors)
        finally:
            for _ in tensors:  # a failed write must not leave the other tensor-parallel ranks in a collective
                pass

    def _finish(self, stack: ExitStack, folder: Path, files: dict[str, str], version: int) -> None:
        self._served.describe(folder, files, version)
        stack.close()

    def _on_all_ranks(self, work: Callable[[], Any]) -> list[Any]:
        """Do each rank's work and return all results. Raises ReloadFailed on all ranks if one failed, ServerAway if the
        only failure is an absent server."""
        result, failure, kind = None, None, ReloadFailed
        try:
            result = work()
        except (OSError, ConfigurationError, ReloadFailed) as error:
            failure, kind = str(error), ServerAway if isinstance(error, ServerAway) else ReloadFailed
        found: list[Any] = [None] * dist.get_world_size(self._control)
        dist.all_gather_object(found, (result, failure, kind), group=self._control)
        if failures := [(f"rank {rank}: {why}", kind) for rank, (_, why, kind) in enumerate(found) if why]:
            kind = ServerAway if all(kind is ServerAway for _, kind in failures) else ReloadFailed
            raise kind("; ".join(why for why, _ in failures))
        return [result for result, *_ in found]
