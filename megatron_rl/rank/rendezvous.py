"""Rendezvous of a world: rank 0 listens on a port of the job's interface and publishes the address."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.files import WRITE_PATIENCE_S
from megatron_rl.contract.records import write
from megatron_rl.rank.addresses import BACKLOG, address_towards, await_address, own_address, pin_gloo_interface


def meet(address: Path, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Return the store of a world of `size` ranks. Collective.

    Args:
        address: file on the shared file system, of this attempt alone, that rank 0 writes and the others wait for.
        timeout: limit of the wait for the file, and of every later wait on the store.

    Raises:
        TimeoutError: rank 0 did not publish an address in time.
        ConfigurationError: rank 0 has no address to publish.
    """
    if rank == 0:
        store = open_store(timeout)
        address.parent.mkdir(parents=True, exist_ok=True)
        write(address, Address(store.host, store.port), patience=WRITE_PATIENCE_S)
        return store
    found = await_address(address, timeout)
    pin_gloo_interface(address_towards(found.host))
    return dist.TCPStore(found.host, found.port, None, False, timeout, wait_for_workers=False)


def open_store(timeout: timedelta) -> dist.TCPStore:
    """Open a store on the job's interface of this node.

    Raises ConfigurationError if the node has no address there.
    """
    # Bind the socket here: the store itself would listen on every interface of the node.
    listener = socket.create_server((own_address(), 0), backlog=BACKLOG)
    host, port = listener.getsockname()
    pin_gloo_interface(host)
    return dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
