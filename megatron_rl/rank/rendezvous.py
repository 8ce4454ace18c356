"""How the ranks of a world find each other: rank 0 listens on a port of the job's interface and publishes it."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_rl.rank.addresses import address_towards, lead_gloo, own_address
from megatron_rl.run_dir import read_json, write_json

LOOK_EVERY_S = 0.1
BACKLOG = 4096  # ranks that may knock at once


def meet(address: Path, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of a world of `size` ranks. Collective.

    Args:
        address: file that rank 0 writes and the others wait for; of this attempt alone, on the shared file system.
        timeout: bounds the wait for the file, and later every wait on the store.

    Raises:
        TimeoutError: rank 0 did not publish an address in time.
        ConfigurationError: rank 0 has none to publish.
    """
    if rank == 0:
        # Bound by us, not by the store, which would listen on every interface of the node.
        listener = socket.create_server((own_address(), 0), backlog=BACKLOG)
        host, port = listener.getsockname()
        lead_gloo(host)
        store = dist.TCPStore(
            host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        address.parent.mkdir(parents=True, exist_ok=True)
        write_json(address, {"host": host, "port": port})
        return store
    found = _await(address, timeout)
    lead_gloo(address_towards(found["host"]))
    return dist.TCPStore(found["host"], found["port"], None, False, timeout, wait_for_workers=False)


def _await(address: Path, timeout: timedelta) -> dict[str, Any]:
    give_up = time.monotonic() + timeout.total_seconds()
    while True:
        # Listed, not opened: network file systems remember for long that a name is missing.
        if address.parent.is_dir() and address in address.parent.iterdir():
            found: dict[str, Any] = read_json(address)
            return found
        if time.monotonic() > give_up:
            raise TimeoutError(f"rank 0 did not publish its address in {address} within {timeout}")
        time.sleep(LOOK_EVERY_S)
