"""The address of this node that the other nodes of the job can reach."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import psutil

from megatron_rl.contract.attempt_records import Address
from megatron_rl.contract.files import names_in
from megatron_rl.contract.records import Absent, Unreadable, read
from megatron_rl.recipe.errors import ConfigurationError

POLL_S = 0.1
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
BACKLOG = 4096  # connections to a port that may wait to be accepted
ANY_PORT = 9  # port of a datagram socket that looks up a route; nothing is sent
PROBED_NODES = 3  # other nodes whose route is looked up before the search ends


def own_address() -> str:
    """Return the IPv4 address of this node on the job's interface: the address that the node's name resolves to.

    Loopback addresses do not count in a job of several nodes (Debian maps a node's own name to 127.0.1.1): the address
    of the route to another node replaces them. GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, restricts the choice to the
    interfaces it names, as it does for those libraries.

    Raises:
        ConfigurationError: a job of several nodes leaves no address.
    """
    several = _nodes() > 1
    allowed = [address for address in _named_interface_addresses() if not (several and is_loopback(address))]
    for address in _candidates(several):
        if not allowed or address in allowed:
            return address
    if allowed:
        return allowed[0]
    raise ConfigurationError(
        f"{_own_name()} does not know an address that the other nodes reach: its name does not resolve, or "
        "resolves to loopback. Set NCCL_SOCKET_IFNAME in the cluster profile's environment to the interface between "
        "the nodes"
    )


def pin_gloo_interface(address: str | None) -> None:
    """Set GLOO_SOCKET_IFNAME to the interface of `address` if the node's name, which gloo relies on, misleads gloo."""
    name = _resolved(socket.gethostname())
    if address is None or is_loopback(address) or not (name is None or is_loopback(name)):
        return
    for interface, one in _interfaces():
        if one == address:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def address_towards(host: str) -> str | None:
    """Return this node's source address of the route to `host`; None without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, ANY_PORT))  # sends nothing on a datagram socket: only looks up the route
        except OSError:
            return None
        return str(probe.getsockname()[0])


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


def is_named(interface: str, names: str) -> bool:
    """Whether NCCL_SOCKET_IFNAME=`names` selects the interface. `eth` is a prefix, `=eth0` a full name, `^eth`
    excludes."""
    others = names.startswith("^")
    in_full = names[others:].startswith("=")
    listed = [word for word in names[others + in_full :].split(",") if word]
    hit = any(interface == word if in_full else interface.startswith(word) for word in listed)
    return bool(listed) and hit != others


def node_names(nodelist: str) -> Iterator[str]:
    """Expand Slurm's node list: `gpu[01-02]-ib` -> `gpu01-ib`, `gpu02-ib`."""
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        yield from _expanded(word)


def is_loopback(address: str) -> bool:
    return address.startswith("127.")


def _expanded(word: str) -> Iterator[str]:
    before, bracket, rest = word.partition("[")
    if not bracket:
        yield word
        return
    inside, _, after = rest.partition("]")
    for span in inside.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            for tail in _expanded(after):
                yield f"{before}{number:0{len(first)}}{tail}"


def _candidates(several: bool) -> Iterator[str]:
    """Addresses that may lead other nodes to this one, best first."""
    by_name = _resolved(_own_name())
    if not several:
        yield by_name or "127.0.0.1"
        return
    launched_from = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    for address in (by_name, launched_from and address_towards(launched_from)):
        if address is not None and not is_loopback(address):
            yield address
    nodelist = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_STEP_NODELIST", "")
    for other in islice((name for name in node_names(nodelist) if name != _own_name()), PROBED_NODES):
        # Loopback counts here: Slurm may run several nodes on one machine.
        if (address := address_towards(other)) is not None:
            yield address


def _named_interface_addresses() -> list[str]:
    """Addresses selected by the first variable that names any interface of this node."""
    for variable in VARIABLES:
        names = os.environ.get(variable, "")
        if found := [address for interface, address in _interfaces() if is_named(interface, names)]:
            return found
    return []


def _interfaces() -> list[tuple[str, str]]:
    """(name, IPv4 address) of each interface that is up."""
    state = psutil.net_if_stats()
    return [
        (name, str(one.address))
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family is socket.AF_INET and name in state and state[name].isup  # one may come between the two looks
    ]


def _nodes() -> int:
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or os.environ.get("SLURM_NNODES") or 1)


def _own_name() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None
