"""The rendezvous of a world's ranks: rank 0 listens on a port of the job's interface and publishes it."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.files import names_in
from megatron_rl.contract.records import Absent, Unreadable, read, write
from megatron_rl.rank.addresses import address_towards, lead_gloo, own_address

LOOK_EVERY_S = 0.1
BACKLOG = 4096  # connections waiting to be accepted


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
        store = open_store(timeout)
        address.parent.mkdir(parents=True, exist_ok=True)
        write(address, Address(store.host, store.port))
        return store
    found = _await(address, timeout)
    lead_gloo(address_towards(found.host))
    return dist.TCPStore(found.host, found.port, None, False, timeout, wait_for_workers=False)


def open_store(timeout: timedelta) -> dist.TCPStore:
    """A store that others reach on the job's interface of this node.

    Raises ConfigurationError where the node has no address there.
    """
    # Bound by us, not by the store, which would listen on every interface of the node.
    listener = socket.create_server((own_address(), 0), backlog=BACKLOG)
    host, port = listener.getsockname()
    lead_gloo(host)
    return dist.TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


def _await(file: Path, timeout: timedelta) -> Address:
    give_up = time.monotonic() + timeout.total_seconds()
    problem = "it is not there"
    while True:
        # Listed, not opened: network file systems remember for long that a name is missing.
        if file.name in names_in(file.parent):
            found = read(Address, file)
            if not isinstance(found, Absent | Unreadable):
                return found
            problem = found.why if isinstance(found, Unreadable) else problem
        if time.monotonic() > give_up:
            raise TimeoutError(f"rank 0 did not publish its address in {file} within {timeout}: {problem}")
        time.sleep(LOOK_EVERY_S)
