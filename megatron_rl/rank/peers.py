"""Connections between ranks that carry bytes over TCP, for the control plane.

A rank listens on the job's interface and publishes its address in the world's store, where those that connect to it
look it up. So it has connections to the ranks it talks to, and to no others.

    opens   -> accepts   secret of the world, channel, own rank: see HELLO
    either  -> other     length of a message, message
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
import weakref
from datetime import timedelta
from typing import BinaryIO

import torch.distributed as dist

from megatron_rl.rank.addresses import BACKLOG, own_address

HELLO = struct.Struct("<32sQI")
HELLO_S = 10.0
"""Seconds that a peer may take to identify itself. A rank serves one peer at a time, so the others wait."""
_LENGTH = struct.Struct("<Q")


class PeerLost(RuntimeError):
    """Another rank has ended, or did not do in time what this rank waited for."""


class Connection:
    """One end of a connection to another rank. Methods raise PeerLost."""

    def __init__(self, connected: socket.socket, rank: int, timeout_s: float) -> None:
        """timeout_s: limit of a send, and of each wait for bytes."""
        connected.settimeout(timeout_s)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank = rank
        self._socket, self._stream = connected, connected.makefile("rb")
        self.close = weakref.finalize(self, _close, self._socket, self._stream)

    def send(self, content: bytes) -> None:
        try:
            self._socket.sendall(_LENGTH.pack(len(content)) + content)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self) -> bytes:
        return self.read(_LENGTH.unpack(self.read(_LENGTH.size))[0])

    def read(self, size: int) -> bytes:
        try:
            content = self._stream.read(size)
        except OSError as error:
            raise self._lost(error) from error
        if len(content) < size:
            raise PeerLost(f"rank {self.rank} closed its connection: it has ended")
        return content

    def identified(self, rank: int, timeout_s: float) -> Connection:
        self.rank = rank
        self._socket.settimeout(timeout_s)
        return self

    def _lost(self, error: OSError) -> PeerLost:
        if isinstance(error, TimeoutError):
            return PeerLost(f"timed out after {self._socket.gettimeout():g} s waiting for rank {self.rank}")
        return PeerLost(f"lost the connection to rank {self.rank}: {error}")


class Peers:
    """The ranks of a world, as one of them reaches them. Used by one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta) -> None:
        """Publish this rank's address.

        Args:
            store: no other Peers may use its keys.
            timeout: limit of every wait.

        Raises ConfigurationError if other nodes cannot reach this one, OSError if no port is free.
        """
        self.rank, self.timeout_s = rank, timeout.total_seconds()
        self._store = store
        self._listener = socket.create_server((own_address(), 0), backlog=BACKLOG)
        self._early: dict[tuple[int, int], Connection] = {}  # (channel, rank) -> one that is not asked for yet
        weakref.finalize(self, self._listener.close)
        host, port = self._listener.getsockname()
        store.set(str(rank), f"{host} {port}")
        if rank == 0:
            store.set("secret", secrets.token_hex(16))
        self._secret = store.get("secret")

    def open(self, rank: int, channel: int) -> Connection:
        """Connect to a rank, which accepts the channel sooner or later. Raises PeerLost."""
        try:
            host, port = self._store.get(str(rank)).decode().split()
            connected = socket.create_connection((host, int(port)), self.timeout_s)
            connected.sendall(HELLO.pack(self._secret, channel, self.rank))
        except (OSError, RuntimeError) as error:  # errors of torch's stores are RuntimeErrors
            raise PeerLost(f"cannot connect to rank {rank}: {error}") from error
        return Connection(connected, rank, self.timeout_s)

    def accept(self, rank: int, channel: int) -> Connection:
        """Wait until a rank opens a channel. Raises PeerLost."""
        give_up = time.monotonic() + self.timeout_s
        while (channel, rank) not in self._early:
            left = give_up - time.monotonic()
            try:
                if left <= 0:  # strangers may connect all the time
                    raise TimeoutError
                self._listener.settimeout(left)
                connected, _ = self._listener.accept()
            except TimeoutError:
                why = f"timed out after {self.timeout_s:g} s waiting for rank {rank} to connect"
                raise PeerLost(why) from None
            self._identify(connected)
        return self._early.pop((channel, rank))

    def _identify(self, connected: socket.socket) -> None:
        unknown = Connection(connected, -1, HELLO_S)
        try:
            secret, channel, rank = HELLO.unpack(unknown.read(HELLO.size))
        except PeerLost:
            return
        if hmac.compare_digest(secret, self._secret):
            self._early[channel, rank] = unknown.identified(rank, self.timeout_s)


def _close(connected: socket.socket, stream: BinaryIO) -> None:
    stream.close()
    connected.close()
