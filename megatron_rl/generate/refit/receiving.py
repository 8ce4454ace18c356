"""A replica's rank in the transfer groups of successive membership epochs, whatever engine uses what it receives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any

from megatron_rl.generate.refit.epoch import Epoch, ReplicaStart, TransferFailed
from megatron_rl.generate.refit.transfer import Receiver
from megatron_rl.generate.refit.transfer_group import TransferGroup

STOP_S = 10.0


class Receiving:
    """Receives one version after another in threads beside the engine. Methods belong to one thread."""

    def __init__(
        self,
        receiver: Receiver,
        started: ReplicaStart,
        rank: int,
        timeout: timedelta,
        beside: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """
        started: identifies the replica.
        rank: of this process in the replica.
        timeout: limit of every wait for other members.
        beside: context of each step, see Device.beside.
        """
        self.receiver = receiver
        self._started, self._rank, self._timeout, self._beside = started, rank, timeout, beside
        self._group: TransferGroup | None = None
        self._newest: Future[None] | None = None  # the version that was begun last
        self._received: int | None = None

    def receive(self, version: int, epoch: dict[str, Any] | None) -> Future[None]:
        """Begin to receive a version, while the engine continues.

        epoch: whose transfer group to join before (`Epoch.to_json`); None: the group remains.
        """
        return self._begin(partial(self._receive, version, None if epoch is None else Epoch.from_json(epoch)))

    def failure(self, version: int) -> BaseException | None:
        """Why this rank has not received the version; None if it has. This waits, for as long as every wait of the
        transfer is limited."""
        if self._newest is None:
            return TransferFailed("this rank is in no transfer group")
        failure = self._newest.exception()
        if failure is None and self._received != version:
            return TransferFailed(f"version {self._received} arrived instead of {version}")
        return failure

    def close(self) -> None:
        """Leave the group, which ends the epoch for all its members, and what waits for them."""
        if self._group is not None and self._newest is not None and not self._newest.done():
            self._group.abort()
            wait([self._newest], STOP_S)
        self._leave()

    def _begin(self, step: Callable[[], None]) -> Future[None]:
        before, self._newest = self._newest, Future()
        # A thread for each: one that waits for members that are gone must not keep the process from ending.
        threading.Thread(target=self._run, args=(step, before, self._newest), name="weights", daemon=True).start()
        return self._newest

    def _run(self, step: Callable[[], None], before: Future[None] | None, done: Future[None]) -> None:
        if before is not None:
            wait([before])
        try:
            with self._beside():
                step()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    def _receive(self, version: int, epoch: Epoch | None) -> None:
        self._received = None
        if epoch is not None:
            self._leave()
            self._group = TransferGroup.join(epoch, epoch.member_rank(*self._started, self._rank), self._timeout)
            self.receiver.connect(self._group)
        if self._group is None:
            raise TransferFailed("this rank is in no transfer group")
        self.receiver.receive(version)
        self._received = version

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()
