"""Refit of an inference server outside the run: every rank writes tensors to a folder, and rank 0 has the server read
it.

The server keeps its previous version until it has read the next one. If it refuses, `current` points back to the
previous version; if it is away, it reads the newest when it starts. Servers reload by

    vllm  POST /collective_rpc {"method": "reload_weights"}: every worker reads the folder on which it was started. Then
          POST /reset_prefix_cache, because the cache belongs to the old weights. vLLM has both if it was started with
          VLLM_SERVER_DEV_MODE=1. They need no token, so only the trainer may reach the server.
    mrl   POST /update_weights {"version": ...}: it knows the folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import httpx
import torch.distributed as dist

from megatron_rl.checkpoint.hf.staging import staged
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai import CONNECT_S, OpenAIInference, authorization
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.refit.served_folder import ReloadFailed, ServedFolder, ServerAway, published_weights, whole_tensors

STARTING = {502, 503, 504}
"""HTTP statuses of a server that starts or stops, or of a proxy in front of it."""


class ServerReload:
    """Has a server read versions that are already written."""

    def __init__(
        self,
        inference: OpenAIInference,
        server: Endpoint,
        kind: Literal["vllm", "mrl"],
        served: ServedFolder,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        inference: client of the server; its `policy_version` is updated.
        server: its address; `timeout_s` bounds a reload.
        transport: for tests.
        """
        self._inference = inference
        self._server = server
        self._kind = kind
        self._served = served
        self._transport = transport

    async def reload(self, version: int) -> None:
        """Have the server read a version.

        Raises:
            ReloadFailed: the server refused. Then `current` names the previous version, which the server still has,
                unless only its cache could not be cleared.
            ServerAway: the server does not answer. Then `current` names this version; try again.
        """
        base = self._server.url.rstrip("/").removesuffix("/v1")
        async with httpx.AsyncClient(
            base_url=base,
            headers=authorization(self._server.token_file, self._server.token_variable),
            timeout=httpx.Timeout(self._server.timeout_s, connect=CONNECT_S),
            trust_env=False,  # a proxy of the environment does not lead to the job's own nodes
            transport=self._transport,
        ) as client:
            with self._served.pointing(version):
                if self._kind == "mrl":
                    await self._post(client, "/update_weights", {"version": version})
                else:
                    await self._post(client, "/collective_rpc", {"method": "reload_weights"})
                    await self._post(client, "/reset_prefix_cache", None)
        self._inference.policy_version = version
        self._served.delete_others(version)

    async def _post(self, client: httpx.AsyncClient, path: str, content: dict[str, Any] | None) -> None:
        where = f"{client.base_url.join(path)}"
        try:
            response = await client.post(path, json=content)
        except httpx.TransportError as error:
            raise ServerAway(f"{where}: {error!r}") from error
        status = f"{where}: HTTP {response.status_code}: {response.text[:500]}"
        if response.status_code in STARTING:
            raise ServerAway(status)
        if self._kind == "vllm" and response.status_code == 404:
            raise ReloadFailed(f"{where} does not exist: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if not response.is_success:
            raise ReloadFailed(status)


class ExternalRefit:
    """Implements `Refit` for a server outside the run."""

    def __init__(
        self,
        trained: Policy,
        model: ModelConfig,
        server: ServerReload,
        served: ServedFolder,
        control: dist.ProcessGroup,
        wait: Callable[[ServerAway], None] | None = None,
    ) -> None:
        """
        control: all ranks, over gloo.
        wait: called on all ranks before a server that is away is tried again; raises if that took too long. None: an
            absent server is an error.
        """
        self._trained = trained
        self._model = model
        self._server = server
        self._served = served
        self._control = control
        self._wait = wait
        own = sum(held.tensor.nbytes for held in published_weights(trained, model))
        self.moved_bytes: int = sum(self._on_all_ranks(lambda: own))
        """Bytes that all ranks together write for a version."""

    def publish(self, policy_version: int) -> None:
        """Write the weights and have the server read them. Collective.

        Raises ReloadFailed on all ranks if one of them failed; ServerAway, see `wait`.
        """
        leads = dist.get_rank(self._control) == 0
        with ExitStack() as stack:
            (folder, *_) = self._on_all_ranks(lambda: self._begin(stack, policy_version) if leads else None)
            of_ranks = self._on_all_ranks(lambda: self._write(Path(folder)))
            files = {name: file for each in of_ranks for name, file in each.items()}
            self._on_all_ranks(lambda: self._finish(stack, Path(folder), files, policy_version) if leads else None)
        while True:
            try:
                self._on_all_ranks(lambda: asyncio.run(self._server.reload(policy_version)) if leads else None)
                return
            except ServerAway as away:
                if self._wait is None:
                    raise
                self._wait(away)

    def finish(self) -> None:
        """Nothing runs in the background."""

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
