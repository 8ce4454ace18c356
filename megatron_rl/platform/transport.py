"""Sending tensors between processes of different worlds: a backend of torch.distributed by itself.

torch.distributed knows one world a process. Its backends do not need one: each is given a store, a rank and a size. So
one made here belongs to nobody's world, ends without ending any, and its errors are exceptions of this module's
callers: a world's watchdog would end the process. As of torch 2.11 to 2.13; nothing else names these classes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]
"""The other rank and what is sent to it, or where to put what it sends: contiguous, on `Transport.device`."""
POLL_S = 0.0001
ABORTS = 1
"""Tag of what nobody sends."""


class Transport(Protocol):
    """One rank's end of a backend. What fails raises RuntimeError; after that it is of no use but to be closed."""

    device: torch.device
    """Where messages are."""

    def connect(self) -> None:
        """Collective, once, before anything else."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive the messages, in the order in which their peers name them. Returns when they have gone and
        come."""

    def gather(self, content: Tensor) -> list[Tensor]:
        """What each rank gives, on the CPU. Collective. content: of one size and type on all."""

    def abort(self) -> None:
        """End what others wait for in this process, from another thread; they get RuntimeError."""

    def close(self) -> None:
        """Let go of its connections and threads. Nothing is waited for."""


class GlooTransport:
    """On the CPU. Whoever waits for a process that is gone or has closed its end gets an error at once, and one that is
    merely silent is waited for as long as `timeout` says, or until this is given up."""

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._begins: tuple[Any, ...] = (store, rank, size, timeout)
        self._size = size
        self._neighbour = (rank + 1) % size
        self._backend: Any = None

    def connect(self) -> None:
        begins, self._begins = self._begins, ()  # the backend keeps the store, and no one else
        self._backend = dist.ProcessGroupGloo(*begins)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        works = [
            *(self._backend.send([tensor], rank, 0) for rank, tensor in sends),
            *(self._backend.recv([tensor], rank, 0) for rank, tensor in receives),
        ]
        for work in works:
            work.wait()

    def gather(self, content: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(content) for _ in range(self._size)]
        self._backend.allgather([parts], [content]).wait()
        return parts

    def abort(self) -> None:
        """See `Transport.abort`: a wait that has lasted too long ends all others, with gloo, so one is made to."""
        if (backend := self._backend) is not None:
            with suppress(RuntimeError):
                backend.recv([torch.empty(1, dtype=torch.uint8)], self._neighbour, ABORTS).wait(
                    timedelta(milliseconds=1)
                )

    def close(self) -> None:
        self._backend, self._begins = None, ()


class NcclTransport:
    """On this process's GPU, by a communicator that is made without blocking: only such a one can be given up while it
    connects.

    The host waits for each exchange: where all streams share one queue to the device (CUDA_DEVICE_MAX_CONNECTIONS=1),
    an operation of this stream that waited there for other worlds would hold up the collectives of this one behind it,
    and those of its other ranks, which the same transfer may be waiting for.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._size = size
        self._timeout = timeout
        self._aborted = threading.Event()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0
        with _environment(
            TORCH_NCCL_ASYNC_ERROR_HANDLING="2",  # abort the communicator, and not the process
            TORCH_NCCL_NONBLOCKING_TIMEOUT=str(int(timeout.total_seconds())),
        ):
            self._backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def connect(self) -> None:
        self._backend.eager_connect_single_device(self.device)
        self.gather(torch.zeros(1))  # all are there: pairs connect in their first exchange, which may be of a few

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        if not (sends or receives):
            return
        self._check()
        self._backend._start_coalescing()
        for rank, tensor in sends:
            self._backend.send([tensor], rank, 0)
        for rank, tensor in receives:
            self._backend.recv([tensor], rank, 0)
        self._backend._end_coalescing().wait()  # the current stream waits
        self._wait()

    def gather(self, content: Tensor) -> list[Tensor]:
        self._check()
        parts = [torch.empty_like(content, device=self.device) for _ in range(self._size)]
        self._backend.allgather([parts], [content.to(self.device)]).wait()
        self._wait()
        return [part.cpu() for part in parts]

    def _wait(self) -> None:
        """For what the current stream was told so far."""
        done = torch.cuda.Event()
        done.record()
        give_up = time.monotonic() + self._timeout.total_seconds()
        while not done.query():
            self._check()
            if time.monotonic() > give_up:
                self.abort()
                raise RuntimeError(f"the GPU was not through with it within {self._timeout}")
            time.sleep(POLL_S)
        self._check()

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            self._backend.abort()

    def close(self) -> None:
        with suppress(RuntimeError):  # of what is already in disorder
            self.abort()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("the transfer was given up: another rank is gone")


TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """The backend reads these when it is made; those of the world are to stay."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
