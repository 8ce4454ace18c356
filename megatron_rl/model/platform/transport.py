"""Transports of tensors between processes of different worlds: backends of torch.distributed without its world.

torch.distributed knows one world per process. Its backends need none: each gets a store, a rank and a size. So a
transport can end without ending a world, and its errors are ordinary exceptions, whereas the watchdog of a world would
end the process. Written for torch 2.8 to 2.13; nothing else uses these classes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Message = tuple[int, Tensor]
"""Rank of the peer, and the contiguous tensor on `Transport.device` to send or to fill."""
TCP_EXCHANGE = timedelta(minutes=30)
"""Limit of an exchange over TCP. A rank that has sent its part of the weights waits until the receivers have all parts,
which takes minutes for a large model. Members that are gone are noticed sooner, see generate/refit/liveness.py."""
POLL_S = 0.0001
UNUSED_TAG = 1


class Transport(Protocol):
    """One rank's end of a transport. Methods raise RuntimeError; after that the transport can only be closed."""

    device: torch.device

    def connect(self) -> None:
        """Connect to all ranks. Collective; call once before anything else."""

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive messages, in the order in which the peers name them. Returns once all are transferred."""

    def gather(self, content: Tensor) -> list[Tensor]:
        """Gather tensors of one shape and dtype from all ranks, on the CPU. Collective."""

    def abort(self) -> None:
        """End the waits of other threads of this process with RuntimeError."""

    def close(self) -> None:
        """Release connections and threads without waiting."""


class GlooTransport:
    """Transport between CPUs. Waiting for a process that ended or closed its transport fails at once; waiting for a
    silent one lasts until `abort`, in an exchange at most TCP_EXCHANGE, else at most `timeout`."""

    device = torch.device("cpu")

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self._arguments: tuple[Any, ...] = (store, rank, size, timeout)
        self._size = size
        self._neighbour = (rank + 1) % size
        self._backend: Any = None

    def connect(self) -> None:
        arguments, self._arguments = self._arguments, ()  # only the backend keeps the store
        self._backend = dist.ProcessGroupGloo(*arguments)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        works = [
            *(self._backend.send([tensor], rank, 0) for rank, tensor in sends),
            *(self._backend.recv([tensor], rank, 0) for rank, tensor in receives),
        ]
        for work in works:
            work.wait(TCP_EXCHANGE)

    def gather(self, content: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(content) for _ in range(self._size)]
        self._backend.allgather([parts], [content]).wait()
        return parts

    def abort(self) -> None:
        # A wait that times out makes gloo end all other waits, so provoke one.
        if (backend := self._backend) is not None:
            with suppress(RuntimeError):
                backend.recv([torch.empty(1, dtype=torch.uint8)], self._neighbour, UNUSED_TAG).wait(
                    timedelta(milliseconds=1)
                )

    def close(self) -> None:
        self._backend, self._arguments = None, ()


class NcclTransport:
    """Transport between this process's GPU and others, over a non-blocking communicator: only such a one can be aborted
    while it connects.

    The host waits for each exchange. If all streams share one queue to the device (CUDA_DEVICE_MAX_CONNECTIONS=1), an
    operation that waited there for another world would block the collectives of this world behind it, and those of its
    other ranks, for which the same transfer may be waiting.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._size = size
        self._timeout = timeout
        self._aborted = threading.Event()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.config.blocking = 0
        # torch reads this when it first waits for such a communicator, which is long after its creation.
        os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(int(timeout.total_seconds())))
        # The host waits for each operation anyway. Otherwise torch would watch this backend in a thread, and a failure
        # that it saw first would end the process: its flag for a dump is one for all backends of the process, and the
        # world's own monitor follows it.
        with _environment(TORCH_NCCL_BLOCKING_WAIT="1"):
            self._backend: Any = dist.ProcessGroupNCCL(store, rank, size, options)

    def connect(self) -> None:
        self._backend.eager_connect_single_device(self.device)
        self.gather(torch.zeros(1))  # wait for all ranks: pairs connect in their first exchange, which may involve few

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
        done = torch.cuda.Event()
        done.record()
        give_up = time.monotonic() + self._timeout.total_seconds()
        while not done.query():
            self._check()
            if time.monotonic() > give_up:
                self.abort()
                raise RuntimeError(f"the GPU did not finish a transfer within {self._timeout}")
            time.sleep(POLL_S)
        self._check()

    def abort(self) -> None:
        if not self._aborted.is_set():
            self._aborted.set()
            self._backend.abort()

    def close(self) -> None:
        with suppress(RuntimeError):  # the communicator may already be broken
            self.abort()

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("the transfer was aborted: another rank is gone")


TRANSPORTS: dict[str, type[GlooTransport] | type[NcclTransport]] = {"gloo": GlooTransport, "nccl": NcclTransport}


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Context of a thread that works on a stream, and thus on its GPU: CUDA selects the first GPU of the process for a
    new thread, whatever the others have selected. Exit waits for the work."""
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def beside(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes the contexts of threads that transfer to or from a device, as Device.beside does."""
    return partial(on_stream, torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
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
