"""Connection between a training rank and its worker of vLLM on the same device: messages, and descriptors of memory.

The rank listens at a Unix socket without a file, whose name only members of the epoch know. Both processes must belong
to one user and prove that they know the epoch's secret:

    worker -> rank   {"nonce": "..."}
    rank -> worker   {"nonce": "...", "proof": "..."}
    worker -> rank   {"proof": "..."}

Each message is its length in four bytes, and JSON.
"""

from __future__ import annotations

import array
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self

from megatron_rl.generate.refit.epoch import Epoch, TransferFailed

HELLO_S = 10.0
"""Seconds within which a peer must prove that it is a member. The rank serves one peer at a time."""
RETRY_S = 0.05
LONGEST = 64 << 20
"""Most bytes of a message."""
_LENGTH = struct.Struct("!I")
_MOST_DESCRIPTORS = 1


class BucketChannel:
    """One end. Waits are limited, and end with TransferFailed when the other end is gone. Only `abort` may be called
    from another thread."""

    def __init__(self, connection: socket.socket, peer: str, timeout_s: float) -> None:
        """peer: who the other end is, for messages."""
        self._connection, self._peer, self._timeout_s = connection, peer, timeout_s
        self._descriptors: list[int] = []

    @classmethod
    def connect(cls, epoch: Epoch, rank: int, timeout_s: float) -> Self:
        """Connect a worker to its rank, once that listens. Raises TransferFailed."""
        give_up = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(_address(epoch, rank))
            except (ConnectionRefusedError, BlockingIOError):
                connection.close()
                if time.monotonic() > give_up:
                    raise TransferFailed(
                        f"rank {rank} of training has not opened its channel of epoch {epoch.number} on this node "
                        f"within {timeout_s:g} s"
                    ) from None
                time.sleep(RETRY_S)
                continue
            channel = cls(connection, f"rank {rank} of training", timeout_s)
            try:
                channel._prove_to_rank(epoch, rank, give_up)
            except BaseException:
                channel.close()
                raise
            return channel

    def send(self, content: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Raises TransferFailed."""
        text = json.dumps(content).encode()
        attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            self._connection.settimeout(self._timeout_s)
            # The first bytes alone carry the descriptors, because a long message goes in pieces.
            self._connection.sendmsg([_LENGTH.pack(len(text))], attached)
            self._connection.sendall(text)
        except TimeoutError:
            raise TransferFailed(f"{self._peer} has read nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise TransferFailed(self._last_words() or f"{self._peer} is gone: {error}") from error

    def receive(self, what: str, timeout_s: float | None = None) -> dict[str, Any]:
        """The next message. If the other end reports a failure instead, this raises it as TransferFailed.

        what: this waits for, for messages.
        timeout_s: seconds for the whole message; default: those of the channel.
        """
        limit = self._timeout_s if timeout_s is None else timeout_s
        give_up = time.monotonic() + limit
        try:
            content = self._read_message(give_up)
        except TimeoutError:
            raise TransferFailed(f"no {what} from {self._peer} within {limit:g} s") from None
        except OSError as error:
            raise TransferFailed(f"{self._peer} is gone, instead of {what}: {error}") from error
        except ValueError as error:
            raise TransferFailed(f"{self._peer} has sent {error}, instead of {what}") from error
        if failure := self._failure_in(content):
            raise TransferFailed(failure)
        return content

    def take_descriptors(self) -> list[int]:
        """Descriptors that came with messages so far. The caller closes them."""
        taken, self._descriptors = self._descriptors, []
        return taken

    @property
    def intact(self) -> bool:
        """Whether the other end is there and has sent nothing unasked."""
        try:
            self._connection.setblocking(False)
            self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def report(self, failure: str) -> None:
        """Send the other end why this one has failed, if it is still there."""
        with suppress(TransferFailed):
            self.send({"failed": failure})

    def abort(self) -> None:
        """End the waits of both ends."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def await_close(self, timeout_s: float) -> None:
        """Send nothing more, and wait until the other end has closed the channel, or is gone, or for `timeout_s`."""
        give_up = time.monotonic() + timeout_s
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            while True:
                self._connection.settimeout(max(0.001, give_up - time.monotonic()))
                if not self._connection.recv(4096):
                    return

    def close(self) -> None:
        self._connection.close()
        for descriptor in self.take_descriptors():
            os.close(descriptor)

    def _last_words(self) -> str | None:
        """The failure that the other end has reported before it closed the channel; None if it has not."""
        with suppress(OSError, ValueError):
            while True:
                if failure := self._failure_in(self._read_message(time.monotonic())):
                    return failure
        return None

    def _failure_in(self, content: dict[str, Any]) -> str | None:
        return f"{self._peer}: {content['failed']}" if "failed" in content else None

    def _read_message(self, give_up: float) -> dict[str, Any]:
        """Raises OSError, and ValueError if it is not a message."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, give_up))
        if length > LONGEST:
            raise ValueError(f"a message of {length} bytes")
        content = json.loads(self._read(length, give_up))
        if not isinstance(content, dict):
            raise ValueError("a message that is not a JSON object")
        return content

    def _read(self, size: int, give_up: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            self._connection.settimeout(max(0.001, give_up - time.monotonic()))
            space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
            part, attached, _, _ = self._connection.recvmsg(size - len(parts), space)
            for level, kind, data in attached:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self._descriptors += array.array("i", data)
            if not part:
                raise ConnectionError("it closed the channel")
            parts += part
        return bytes(parts)

    def _prove_to_rank(self, epoch: Epoch, rank: int, give_up: float) -> None:
        _check_user(self._connection)
        nonce = secrets.token_hex(16)
        self.send({"nonce": nonce})
        hello = self.receive("proof that it is a member", max(0.001, give_up - time.monotonic()))
        nonces = f"{nonce} {hello.get('nonce')}"
        if not hmac.compare_digest(str(hello.get("proof")), _keyed(epoch, f"rank {rank} {nonces}")):
            raise TransferFailed(f"the process at the address of rank {rank} does not know the secret of the epoch")
        self.send({"proof": _keyed(epoch, f"worker {rank} {nonces}")})

    def _prove_to_worker(self, epoch: Epoch, rank: int) -> None:
        _check_user(self._connection)
        nonce = secrets.token_hex(16)
        nonces = f"{self.receive('nonce', HELLO_S).get('nonce')} {nonce}"
        self.send({"nonce": nonce, "proof": _keyed(epoch, f"rank {rank} {nonces}")})
        proof = str(self.receive("proof that it is a member", HELLO_S).get("proof"))
        if not hmac.compare_digest(proof, _keyed(epoch, f"worker {rank} {nonces}")):
            raise TransferFailed("a process does not know the secret of the epoch")


class BucketListener:
    """Address at which a training rank waits for its worker."""

    def __init__(self, epoch: Epoch, rank: int) -> None:
        """Raises TransferFailed if the address is taken, as by an earlier join of the same epoch."""
        self._epoch, self._rank = epoch, rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(epoch, rank))
            self._socket.listen()
        except OSError as error:
            self._socket.close()
            raise TransferFailed(f"rank {rank} cannot open its channel of epoch {epoch.number}: {error}") from error

    def accept(self, timeout_s: float) -> BucketChannel:
        """Wait for the worker. Processes that are not members are turned away. Raises TransferFailed.

        timeout_s: for the worker to come, and then of each wait of the channel.
        """
        give_up = time.monotonic() + timeout_s
        peer = f"the worker of vLLM beside rank {self._rank}"
        while True:
            try:
                self._socket.settimeout(max(0.001, give_up - time.monotonic()))
                connection, _ = self._socket.accept()
            except TimeoutError:
                raise TransferFailed(f"{peer} did not connect within {timeout_s:g} s") from None
            except OSError as error:
                raise TransferFailed(f"rank {self._rank} stopped waiting for {peer}: {error}") from error
            channel = BucketChannel(connection, peer, timeout_s)
            try:
                channel._prove_to_worker(self._epoch, self._rank)
            except TransferFailed:
                channel.close()
            else:
                return channel

    def abort(self) -> None:
        """End `accept` of another thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _address(epoch: Epoch, rank: int) -> str:
    """The first byte 0 makes it a name without a file."""
    return f"\0mrl-{_keyed(epoch, f'address {rank}')[:40]}"


def _keyed(epoch: Epoch, text: str) -> str:
    return hmac.new(epoch.secret.encode(), f"epoch {epoch.number} {text}".encode(), hashlib.sha256).hexdigest()


def _check_user(connection: socket.socket) -> None:
    """Raises TransferFailed if the other end belongs to another user."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if user != os.getuid():
        raise TransferFailed(f"a process of user {user} has connected, and this one belongs to user {os.getuid()}")
