"""Rendezvous of a world: rank 0 listens on a port of the job's interface and publishes the address."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.files import names_in
from megatron_rl.contract.records import Absent, Unreadable, read, write
from megatron_rl.rank.addresses import BACKLOG, address_towards, own_address, pin_gloo_interface

POLL_S = 0.1


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
        write(address, Address(store.host, store.port))
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


def await_address(file: Path, timeout: timedelta) -> Address:
    """Wait until rank 0 has published an address in a file on the shared file system. Raises TimeoutError."""
    give_up = time.monotonic() + timeout.total_seconds()
    problem = "it does not exist"
    while True:
        # List the folder instead of opening the file: network file systems cache for long that a name is missing.
        if file.name in names_in(file.parent):
            found = read(Address, file)
            if not isinstance(found, Absent | Unreadable):
                return found
            problem = found.why if isinstance(found, Unreadable) else problem
        if time.monotonic() > give_up:
            raise TimeoutError(f"rank 0 did not publish its address in {file} within {timeout}: {problem}")
        time.sleep(POLL_S)
