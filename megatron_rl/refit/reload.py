"""How a server is told to read its weights again. Pure but for the one that asks.

vllm      POST /collective_rpc {"method": "reload_weights"}: every worker reads the directory that it was started on.
          Then POST /reset_prefix_cache: what is cached there is of the weights before. Both are there where the
          server was started with VLLM_SERVER_DEV_MODE=1, and need no token, so only the trainer may reach it.
sglang    POST /update_weights_from_disk {"model_path": ...}; it answers {"success": ..., "message": ...}.
mrl       POST /update_weights {"version": ...}: it knows the directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

ServerKind = Literal["vllm", "sglang", "mrl"]

STARTING = {502, 503, 504}
"""Statuses of a server that is coming up, or going down, or of a proxy before it."""


class ReloadFailed(RuntimeError):
    """A server did not take new weights."""


class ServerAway(ReloadFailed):
    """A server could not be asked: it is not there yet, or no more. It reads what `current` names when it starts."""


@dataclass(frozen=True, slots=True)
class Call:
    path: str
    content: dict[str, Any] | None


def reload_calls(kind: ServerKind, folder: Path, version: int) -> Sequence[Call]:
    """What to ask a server, one after the other, that was started on `folder`."""
    if kind == "vllm":
        return Call("/collective_rpc", {"method": "reload_weights"}), Call("/reset_prefix_cache", None)
    if kind == "mrl":
        return (Call("/update_weights", {"version": version}),)
    content = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
    return (Call("/update_weights_from_disk", content),)


async def reload(client: httpx.AsyncClient, kind: ServerKind, folder: Path, version: int) -> None:
    """Have a server read the weights in `folder`.

    client: of the server's address, with its token and time-outs.

    Raises ReloadFailed, or ServerAway where it cannot be asked.
    """
    for call in reload_calls(kind, folder, version):
        where = f"{client.base_url.join(call.path)}"
        try:
            response = await client.post(call.path, json=call.content)
        except httpx.TransportError as error:
            raise ServerAway(f"{where}: {error!r}") from error
        if response.status_code in STARTING:
            raise ServerAway(f"{where}: HTTP {response.status_code}: {response.text[:500]}")
        if kind == "vllm" and response.status_code == 404:
            raise ReloadFailed(f"{where} is not there: start vLLM with VLLM_SERVER_DEV_MODE=1")
        if not response.is_success or _refused(response):
            raise ReloadFailed(f"{where}: HTTP {response.status_code}: {response.text[:500]}")


def _refused(response: httpx.Response) -> bool:
    """Whether a server says in a good answer that it did not do it."""
    try:
        said = response.json()
    except ValueError:  # vLLM says nothing where there is nothing to say
        return False
    return isinstance(said, dict) and said.get("success") is False
