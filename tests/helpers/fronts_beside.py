"""Fronts on the devices of training ranks, in threads of the test: their engine takes real weights out of buckets, and
samples tokens that are functions of the request's key."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import scripted_replica
import torch
from bucket_helpers import OneWorker
from scripted_replica import ScriptedEngine, ScriptedReplica, ScriptedTurns, ScriptedWeights
from torch import Tensor
from transfer_helpers import host_memory

from megatron_rl.contract.attempt_records import ReplicaState
from megatron_rl.contract.codes import REPLICA_WAITING
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.refit.epoch import DEVICE
from megatron_rl.generate.replicas.wire import digest_of, read_token
from megatron_rl.generate.vllm.share import Setting, WeightShare
from megatron_rl.model.tokenizer import build_tokenizer
from megatron_rl.recipe.config import read_config

LIMIT = timedelta(seconds=30)
CPU = torch.device("cpu")


class PulledWeights(ScriptedWeights):
    """Pulls each version in a thread."""

    def __init__(self, engine: ScriptedEngine, share: WeightShare) -> None:
        super().__init__(engine)
        self._share, self._thread = share, ThreadPoolExecutor(1)
        self.loaded: dict[str, Tensor] = {}
        self.dies_at: int | None = None
        """Version in whose middle it dies."""
        self.stands_at: int | None = None
        """Version with which it samples nothing, until `go_on`."""
        self.hold: Callable[[str], None] = lambda act: None

    def receive(self, version: int, epoch: dict[str, Any] | None) -> Future[None]:
        return self._thread.submit(self._pull, version, epoch)

    def swap(self, version: int) -> None:
        if version == self.stands_at:
            self._engine.hold_at = 0
        super().swap(version)

    def _pull(self, version: int, epoch: dict[str, Any] | None) -> None:
        self._share.receive(version, epoch)
        self._share.wait(version)
        self.hold("receive")
        for name, tensor in self._share.tensors():
            if version == self.dies_at:
                self._share._leave()
                raise RuntimeError("it was killed")
            self.loaded[name] = tensor.clone()
        self.said.append(("receive", version))


class HeldTurns(ScriptedTurns):
    """Starts when `let_start` is set, and notes what it is asked."""

    def __init__(self, front: FrontBeside) -> None:
        super().__init__(front.leader, front.engine)
        self._front, self._asked = front, False

    @property
    def state(self) -> Any:
        if self._asked and self._front.let_start.is_set():
            super().start()
        return super().state

    def start(self) -> None:
        self._asked = True
        self._front.acts.append("start")

    async def sleep(self) -> None:
        self._front.acts.append("sleep")
        await asyncio.to_thread(self._front.weights.hold, "sleep")
        await super().sleep()


class FrontBeside(ScriptedReplica):
    def __init__(self, run: RunDir, number: int, start: int = 0, attempt: int = 1) -> None:
        digest, token = digest_of(run.resolved), read_token(run.token)
        super().__init__(
            run.attempt(attempt), number, start, version=None, digest=digest, token=token, transport=DEVICE
        )
        config = read_config(run)
        tokenizer = build_tokenizer(config.tokenizer)
        setting = Setting((number, start), LIMIT, config.model, tokenizer.vocab_size)
        share = WeightShare(setting, OneWorker(), host_memory, nullcontext, CPU)
        self.weights: PulledWeights = PulledWeights(self.engine, share)
        self.leader._weights = self.weights
        self.acts: list[str] = []
        self.let_start = threading.Event()
        self.let_start.set()
        self.service.engine.turns = HeldTurns(self)
        self._ended = run.attempt(attempt).replica(number).state, ReplicaState(number, REPLICA_WAITING, start + 1, 0.0)

    def die(self) -> None:
        """Close all its connections, which the host side sees."""
        super().die()
        write(*self._ended)

    @property
    def stands(self) -> bool:
        return self.engine.hold_at == 0 and self.engine.busy

    @property
    def known(self) -> bool:
        """Whether training rank 0 has reached it."""
        return self.service.heard_at is not None

    def go_on(self) -> None:
        self.engine.hold_at = None

    @property
    def versions(self) -> list[int]:
        """Versions that it has loaded."""
        return [version for _, version in self.weights.said if _ == "receive"]


def few_tokens(monkeypatch: Any, vocabulary: int) -> None:
    """Make scripted engines sample tokens of a small vocabulary."""
    original = scripted_replica.token_at
    monkeypatch.setattr(scripted_replica, "token_at", lambda *args: original(*args) % vocabulary)
