"""Connections between the members of an epoch that carry heartbeats, so that every member learns within seconds that
one is gone.

Each member is connected to the first one. When a connection ends, the first member closes all others, so every member
notices, whatever it does: a NCCL kernel alone would wait for ever. A stopped process or a node without power closes no
connection, so a member that sends no heartbeat for a while counts as gone too. Heartbeats come from a thread, so a slow
member still sends them.

    member -> first   {"epoch": 3, "rank": 5, "secret": "..."}
    first -> member   {"port": 40123}, once all members are connected
    member -> first   a byte every second
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Self

from megatron_rl.generate.refit.epoch import Epoch, ReplicaLost, TransferFailed
from megatron_rl.rank.addresses import own_address

HELLO_S = 2.0
"""Seconds within which a peer must identify itself. The first member serves one peer at a time, so the others wait."""
LONGEST_LINE = 4096
ARRIVE_S = 30.0
"""Seconds between two ranks of replicas that connect, once all training ranks have: the replicas have already accepted
the epoch."""
BEAT_S = 1.0
SILENCE_S = 15.0
"""Seconds without a heartbeat after which a member counts as gone."""
NOTICE_S = 5.0
"""Seconds within which the first member notices the end of a process whose peers have an error."""
JOIN_S = 10.0
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 4,  # seconds without traffic before the first probe
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,  # milliseconds that sent data may stay unacknowledged
}


class Listener:
    def __init__(self) -> None:
        """Raises ConfigurationError if other nodes cannot reach this one, OSError if no port is free."""
        self.socket = socket.create_server((own_address(), 0), backlog=1024)
        self.secret = secrets.token_urlsafe(32)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()
        return str(host), int(port)

    def close(self) -> None:
        self.socket.close()


class Liveness:
    """One member's connections: the first member has one to each other member, which has one to the first."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        self._peers = dict(peers)
        self._leads = 0 not in peers
        self._wake, self._woken = socket.socketpair()
        self._watcher: threading.Thread | None = None
        self.lost: frozenset[int] = frozenset()
        """Ranks whose connection has ended. On the first member these are the lost ones. On the others it is always the
        first, which also closes its connections when a third member is lost."""

    @classmethod
    def lead(cls, listener: Listener, epoch: Epoch, port: int, timeout: float) -> Self:
        """Wait for all other members and send each of them `port`. Collective with `follow`.

        timeout: seconds. Raises ReplicaLost when a member does not connect in time; it names no replica when that
            member is a training rank.
        """
        peers: dict[int, socket.socket] = {}
        missing = set(range(1, epoch.size))
        of_training = epoch.training_ranks - 1
        last = give_up = time.monotonic() + timeout
        try:
            while missing:
                if not of_training:
                    give_up = min(give_up, time.monotonic() + ARRIVE_S)
                listener.socket.settimeout(max(0.001, give_up - time.monotonic()))
                try:
                    connection, _ = listener.socket.accept()
                except TimeoutError:
                    names = ", ".join(map(epoch.name_of, sorted(missing)[:8]))
                    limit = f"{timeout:g} s" if give_up == last else f"{ARRIVE_S:g} s after the others"
                    why = f"epoch {epoch.number}: {names} did not connect within {limit}"
                    raise ReplicaLost(epoch.replicas_of(missing), why) from None
                rank = _identify(connection, epoch)
                if rank in missing:
                    peers[rank] = connection
                    missing.remove(rank)
                    of_training -= rank < epoch.training_ranks
                    give_up = last
                else:
                    connection.close()
            for rank, connection in peers.items():
                try:
                    _send(connection, {"port": port})
                except OSError as error:
                    why = f"epoch {epoch.number}: {epoch.name_of(rank)} is gone: {error}"
                    raise ReplicaLost(epoch.replicas_of([rank]), why) from error
        except BaseException:
            for connection in peers.values():
                connection.close()
            raise
        return cls(peers)

    @classmethod
    def follow(cls, epoch: Epoch, rank: int, timeout: float) -> tuple[Self, int]:
        """Connect to the first member. Returns its port once all members are connected.

        timeout: seconds. Raises TransferFailed if the first member is gone, rejects this one or is too slow.
        """
        connection = None
        try:
            connection = socket.create_connection((epoch.host, epoch.port), timeout)
            _send(connection, {"epoch": epoch.number, "rank": rank, "secret": epoch.secret})
            port = int(_receive(connection, timeout)["port"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if connection is not None:
                connection.close()
            raise TransferFailed(
                f"epoch {epoch.number}: no start from {epoch.host}:{epoch.port} within {timeout:g} s: {error}"
            ) from error
        return cls({0: connection}), port

    def watch(self, on_loss: Callable[[], object]) -> None:
        """Start watching, and sending heartbeats. on_loss: called once, in a thread, when a member is lost."""
        for connection in self._peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._watcher = threading.Thread(target=self._watch, args=(on_loss,), name="liveness", daemon=True)
        self._watcher.start()

    def await_loss(self) -> None:
        """Wait until the loss of a member is known here, for at most NOTICE_S. A member with an error calls this before
        `close`, so that the one that has ended is taken for lost, and not those that had an error from that."""
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(NOTICE_S)

    def close(self) -> None:
        """Close the connections, which ends the epoch for all members. `on_loss` is not called afterwards."""
        self._woken.close()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(JOIN_S)
        self._end()
        self._wake.close()

    def _watch(self, on_loss: Callable[[], object]) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            for rank, connection in self._peers.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            self.lost = self._until_loss(selector)
        self._end()
        if self.lost:
            on_loss()

    def _until_loss(self, selector: selectors.BaseSelector) -> frozenset[int]:
        """Wait until ranks are lost and return them; empty when this end was closed."""
        silent_s = dict.fromkeys(self._peers if self._leads else (), 0.0)
        before = time.monotonic()
        while True:
            ready = [key.data for key, _ in selector.select(BEAT_S)]
            if None in ready:
                return frozenset()
            if gone := frozenset(rank for rank in ready if not _alive(self._peers[rank])):
                return gone
            now = time.monotonic()
            # Time in which this process itself was stopped does not count as silence: after SIGSTOP and SIGCONT, `now`
            # may have moved on by minutes while heartbeats wait unread.
            passed, before = min(now - before, 2 * BEAT_S), now
            for rank in silent_s:
                silent_s[rank] = 0.0 if rank in ready else silent_s[rank] + passed
            if gone := frozenset(rank for rank, seconds in silent_s.items() if seconds > SILENCE_S):
                return gone
            if not self._leads:
                _beat(self._peers[0])

    def _end(self) -> None:
        for connection in self._peers.values():
            connection.close()


def _alive(connection: socket.socket) -> bool:
    """Read the heartbeats of another member. Returns whether its connection is open."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _beat(connection: socket.socket) -> None:
    with suppress(OSError):  # a closed connection shows when it is read
        connection.send(b".")


def _identify(connection: socket.socket, epoch: Epoch) -> int | None:
    """Rank of the peer that has connected; None if it is not a member of the epoch."""
    try:
        hello = _receive(connection, HELLO_S)
        known = hmac.compare_digest(str(hello["secret"]).encode(), epoch.secret.encode())
        return int(hello["rank"]) if known and hello["epoch"] == epoch.number else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """Read one line of JSON, byte by byte so that later bytes stay in the socket. Raises OSError and ValueError.

    timeout: seconds for the whole line.
    """
    line = b""
    give_up = time.monotonic() + timeout
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, give_up - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) >= LONGEST_LINE:
            raise ConnectionError("the connection ended before a whole line came")
        line += byte
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("the line is not a JSON object")
    return content
