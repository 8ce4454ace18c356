"""Connections between the members of an epoch that carry signs of life: one that ends tells that a member is gone.

Each member has one to the first. When one ends, the first ends all others, so every member knows within moments,
whatever it does meanwhile: a kernel of NCCL would wait for ever. A process that was stopped, or a node without power,
ends no connection: it is taken for gone when it has given no sign for a while. One that is merely slow gives them from
a thread of its own.

    member -> first   {"epoch": 3, "rank": 5, "secret": "..."}
    first -> member   {"port": 40123}, once all are there
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

from megatron_rl.rank.addresses import own_address
from megatron_rl.refit.epoch import Epoch, ReplicaLost, TransferFailed

HELLO_S = 2.0
"""That one who connects has to say who it is: while the first member listens to it others wait."""
LONGEST_LINE = 4096
ARRIVE_S = 30.0
"""That ranks of replicas may come later than the last other one, when those of training are there: they were asked, and
have accepted."""
BEAT_S = 1.0
"""Between two signs of life."""
SILENCE_S = 15.0
"""Without any a member is taken for gone."""
JOIN_S = 10.0
"""For `on_loss` to come to its end."""
_KEEP_ALIVE = {
    "TCP_KEEPIDLE": 4,  # s without traffic until the first probe
    "TCP_KEEPINTVL": 2,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,  # ms that what was sent may stay unacknowledged
}


class Listener:
    """Where the first member of an epoch awaits the others: a port of this node on the job's interface."""

    def __init__(self) -> None:
        """Raises ConfigurationError where the node has no address that others reach, OSError where none can be had."""
        self.socket = socket.create_server((own_address(), 0), backlog=1024)
        self.secret = secrets.token_urlsafe(32)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()
        return str(host), int(port)

    def close(self) -> None:
        self.socket.close()


class Lifeline:
    """One member's end of it: of the first, connections to all others; of another, one to the first."""

    def __init__(self, peers: Mapping[int, socket.socket]) -> None:
        """peers: by rank of the epoch; they are closed with this."""
        self._peers = dict(peers)
        self._leads = 0 not in peers
        self._wake, self._woken = socket.socketpair()
        self._watcher: threading.Thread | None = None
        self.lost: frozenset[int] = frozenset()
        """Ranks whose connection has ended: of the first member those that are gone; of another the first, which may
        only say so of a third."""

    @classmethod
    def lead(cls, listener: Listener, epoch: Epoch, port: int, timeout: float) -> Self:
        """Wait for all others, and tell each of a port. Collective with `follow`.

        timeout: seconds. Raises ReplicaLost, of nobody where it is a rank of training, when one does not come in time.
        """
        peers: dict[int, socket.socket] = {}
        last = give_up = time.monotonic() + timeout
        try:
            while missing := set(range(1, epoch.size)) - peers.keys():
                if min(missing) >= epoch.training_ranks:
                    give_up = min(give_up, time.monotonic() + ARRIVE_S)
                listener.socket.settimeout(max(0.001, give_up - time.monotonic()))
                try:
                    connection, _ = listener.socket.accept()
                except TimeoutError:
                    names = ", ".join(map(epoch.name_of, sorted(missing)[:8]))
                    limit = f"{timeout:g} s" if give_up == last else f"{ARRIVE_S:g} s after the others"
                    why = f"epoch {epoch.number}: {names} did not come within {limit}"
                    raise ReplicaLost(epoch.replicas_of(missing), why) from None
                rank = _who(connection, epoch)
                if rank in missing:
                    peers[rank] = connection
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
        """Come to the first member. Returns once all are there, with the port that it tells of.

        timeout: seconds. Raises TransferFailed where the first is gone, does not want this one, or is too slow.
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
        """Begin to watch, and to give signs of life. on_loss: called once, in a thread, when a member is gone."""
        for connection in self._peers.values():
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEP_ALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._watcher = threading.Thread(target=self._watch, args=(on_loss,), name="lifeline", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """End it, and with it everybody's. `on_loss` is not called any more."""
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
        """The ranks that are gone, as soon as there are any; none when this was closed."""
        silent_s = dict.fromkeys(self._peers if self._leads else (), 0.0)
        before = time.monotonic()
        while True:
            ready = [key.data for key, _ in selector.select(BEAT_S)]
            if None in ready:
                return frozenset()
            if gone := frozenset(rank for rank in ready if not _hears(self._peers[rank])):
                return gone
            now = time.monotonic()
            # What passed while this process itself did not run says nothing of others.
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


def _hears(connection: socket.socket) -> bool:
    """Take in the signs of life of another member. Returns whether it is there."""
    try:
        return bool(connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _beat(connection: socket.socket) -> None:
    with suppress(OSError):  # of one that is gone: that is heard
        connection.send(b".")


def _who(connection: socket.socket, epoch: Epoch) -> int | None:
    """The rank of who connects; None of one who does not belong here."""
    try:
        hello = _receive(connection, HELLO_S)
        known = hmac.compare_digest(str(hello["secret"]).encode(), epoch.secret.encode())
        return int(hello["rank"]) if known and hello["epoch"] == epoch.number else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _send(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive(connection: socket.socket, timeout: float) -> dict[str, Any]:
    """One line, byte by byte: nothing is read that comes after it. Raises OSError and ValueError.

    timeout: seconds for all of it.
    """
    line = b""
    give_up = time.monotonic() + timeout
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, give_up - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) >= LONGEST_LINE:
            raise ConnectionError("the connection ended before it said anything")
        line += byte
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("not what was expected")
    return content
