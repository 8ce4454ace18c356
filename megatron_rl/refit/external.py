"""An inference server of another project as the policy: it reads what the trainer writes.

    FOLDER/version-000012/    safetensors by Hugging Face names, configuration and tokenizer: as models are published
    FOLDER/current            -> version-000012; the server is started on it: vllm serve FOLDER/current

FOLDER is on shared memory (/dev/shm/...) where server and trainer share a node, else on the shared file system. A
version is there whole or not at all, and the one before stays until the server has taken the next one. Where it does
not, `current` goes back to it; where there is no server to be asked, one that is started reads the newest.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch.distributed as dist
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import INDEX, POLICY_VERSION
from megatron_rl.checkpoint.hf.staging import carry, staged
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.openai import CONNECT_S, OpenAIInference, authorization
from megatron_rl.inference.openai_bodies import Endpoint
from megatron_rl.model.config import ModelConfig
from megatron_rl.model.policy import Policy
from megatron_rl.refit.reload import ReloadFailed, ServerAway, ServerKind, reload
from megatron_rl.refit.whole import buckets, published_weights, whole_tensors

SHARD_BYTES = 1 << 30
_VERSION = re.compile(r"version-\d{6}")


def version_folder(folder: Path, version: int) -> Path:
    """Where in the folder of a server a version is."""
    return folder / f"version-{version:06d}"


@dataclass(frozen=True, slots=True)
class ServedFolder:
    """Where a server reads its weights."""

    folder: Path
    published: Path
    """A published model, or a directory like one, whose configuration and tokenizer go along."""
    shard_bytes: int = SHARD_BYTES

    @property
    def current(self) -> Path:
        """What the server is started on."""
        return self.folder / "current"

    def version(self, version: int) -> Path:
        return version_folder(self.folder, version)

    def own(self) -> None:
        """Make the folder, or see that nobody else put it there: in /dev/shm everybody may, and who has it chooses what
        the server reads. Raises ConfigurationError and OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.folder.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise ConfigurationError(f"{self.folder} is a link: name the folder that it leads to")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigurationError(
                f"{self.folder} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}: weights are "
                "written only to a folder of one's own that nobody else can write to; name another one, or chmod 700"
            )

    def write(self, into: Path, writer: int, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Write the tensors of one writer to files of its own. Returns the file of each. Raises OSError."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file  # an extra of mrl

        files: dict[str, str] = {}
        for number, bucket in enumerate(buckets(tensors, self.shard_bytes)):
            file = f"model-{writer:05d}-{number:05d}.safetensors"
            try:
                save_file(bucket, into / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{into / file} cannot be written: {error}") from error
            files |= dict.fromkeys(bucket, file)
        return files

    def describe(self, into: Path, files: dict[str, str], version: int) -> None:
        """Put beside the weights what a server wants to know of them."""
        carry(self.published, into)
        size = sum((into / file).stat().st_size for file in set(files.values()))
        metadata = {"total_size": size, POLICY_VERSION: version}
        index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
        (into / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    @contextmanager
    def pointing(self, version: int) -> Iterator[None]:
        """Have `current` name this version; where the server does not take it then, what it named before. So a server
        that is started again has the weights that the trainer takes it to have."""
        before = self.current.readlink() if self.current.is_symlink() else None
        self._point(Path(self.version(version).name))
        try:
            yield
        except ServerAway:
            raise
        except BaseException:
            self._point(before)
            raise

    def _point(self, target: Path | None) -> None:
        """From one moment to the next. target: None for no link at all."""
        if target is None:
            self.current.unlink(missing_ok=True)
            return
        link = self.folder / ".current.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        link.replace(self.current)

    def forget_others(self, version: int) -> None:
        """Delete the versions that are not this one."""
        for path in self.folder.iterdir():
            if _VERSION.fullmatch(path.name) and path != self.version(version):
                shutil.rmtree(path, ignore_errors=True)


class ExternalPolicy:
    """Implements `UpdatableInference`: the weights of a server, from whole tensors of one process."""

    def __init__(
        self,
        inference: OpenAIInference,
        server: Endpoint,
        kind: ServerKind,
        served: ServedFolder,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        inference: what asks the server for answers; it learns of the version.
        server: its address; `timeout_s` bounds a reload.
        transport: for tests.
        """
        self._inference = inference
        self._server = server
        self._kind = kind
        self._served = served
        self._transport = transport

    async def update_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See `UpdatableInference.update_weights`. Raises ReloadFailed; OSError and ConfigurationError where the files
        cannot be written. The server has then the weights it had; see `reload`."""
        self._served.own()
        with staged(self._served.version(version), 0, replace=True) as folder:
            self._served.describe(folder, self._served.write(folder, 0, tensors), version)
        await self.reload(version)

    async def reload(self, version: int) -> None:
        """Have the server take a version that is written.

        Raises:
            ReloadFailed: it has not. Then `current` names the version before, which the server has, unless what it had
                cached could not be cleared.
            ServerAway: there is no answer. Then `current` names this version; ask again.
        """
        base = self._server.url.rstrip("/").removesuffix("/v1")
        async with httpx.AsyncClient(
            base_url=base,
            headers=authorization(self._server),
            timeout=httpx.Timeout(self._server.timeout_s, connect=CONNECT_S),
            trust_env=False,  # a proxy of the environment does not lead to the job's own nodes
            transport=self._transport,
        ) as client:
            with self._served.pointing(version):
                await reload(client, self._kind, self._served.current.resolve(), version)
        self._inference.policy_version = version
        self._served.forget_others(version)


class ExternalRefit:
    """Implements `Refit`: each rank writes what it is the first to hold, and rank 0 has the server read it."""

    def __init__(
        self,
        trained: Policy,
        model: ModelConfig,
        external: ExternalPolicy,
        served: ServedFolder,
        control: dist.ProcessGroup,
        wait: Callable[[ServerAway], None] | None = None,
    ) -> None:
        """
        control: all ranks, over gloo.
        wait: called on all ranks before a server that is away is asked again; to raise where that has been long enough.
            None: that is not waited for.
        """
        self._trained = trained
        self._model = model
        self._external = external
        self._served = served
        self._control = control
        self._wait = wait
        own = sum(held.tensor.nbytes for held in published_weights(trained, model))
        self.moved_bytes: int = sum(self._agree(lambda: own))
        """That are written with a publication."""

    def publish(self, policy_version: int) -> None:
        """See `Refit.publish`. Raises ReloadFailed on all ranks where one of them failed."""
        leads = dist.get_rank(self._control) == 0
        with ExitStack() as stack:
            (folder, *_) = self._agree(partial(self._begin, stack, policy_version) if leads else _nothing)
            of_ranks = self._agree(partial(self._write, Path(folder)))
            files = {name: file for each in of_ranks for name, file in each.items()}
            self._agree(partial(self._finish, stack, Path(folder), files, policy_version) if leads else _nothing)
        while True:
            try:
                self._agree((lambda: asyncio.run(self._external.reload(policy_version))) if leads else _nothing)
            except ServerAway as away:
                if self._wait is None:
                    raise
                self._wait(away)
            else:
                return

    def finish(self) -> None:
        """See `Refit.finish`: it is."""

    def _begin(self, stack: ExitStack, policy_version: int) -> str:
        self._served.own()
        target = self._served.version(policy_version)
        return str(stack.enter_context(staged(target, self.moved_bytes, replace=True)))

    def _write(self, folder: Path) -> dict[str, str]:
        tensors = whole_tensors(self._trained, self._model)
        try:
            return self._served.write(folder, dist.get_rank(self._control), tensors)
        finally:
            for _ in tensors:  # the other ranks of a tensor wait for this one
                pass

    def _finish(self, stack: ExitStack, folder: Path, files: dict[str, str], version: int) -> None:
        self._served.describe(folder, files, version)
        stack.close()

    def _agree(self, work: Callable[[], Any]) -> list[Any]:
        """What the work of each rank comes to. Raises ReloadFailed on all where it failed on one."""
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


def _nothing() -> None:
    """What ranks do that only wait for another."""
