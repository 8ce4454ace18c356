"""A teacher on servers that the run did not start."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from itertools import compress
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Branch
from megatron_rl.distill.config import TeacherServers
from megatron_rl.errors import ConfigurationError
from megatron_rl.inference.api import PromptTooLong
from megatron_rl.inference.openai import EndpointAway, EndpointError
from megatron_rl.inference.openai_bodies import Endpoint, UnusableAnswer
from megatron_rl.inference.served import ServedPolicy
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import POLL_S, SafePoints

logger = logging.getLogger(__name__)

AT_ONCE = 64
"""Most sequences that one data-parallel replica has at the servers at a time."""


class ServedTeacher:
    """Asks servers for log-probs. The first rank of each data-parallel replica asks for the replica's sequences, and
    the others get its answers."""

    def __init__(
        self,
        servers: TeacherServers,
        tokenizer: Tokenizer,
        groups: Groups,
        safe_points: SafePoints,
        limit_s: float,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        limit_s: seconds that all servers may be away.
        transport: for tests.
        """
        self._groups, self._safe_points = groups, safe_points
        self._asks = groups.model.rank() == 0 and groups.context.rank() == 0
        self._served = ServedPolicy(endpoints_of(servers), tokenizer, limit_s, transport=transport)
        self._last_token, self._end = tokenizer.vocab_size - 1, tokenizer.eos_id
        self._loop = asyncio.new_event_loop()
        if self._asks:
            threading.Thread(target=self._loop.run_forever, name="teacher", daemon=True).start()

    def check(self) -> None:
        """Wait until a server answers, and check that it knows the policy's last token. Collective.

        Raises ConfigurationError, or LeaveAgreed if a rank is asked to leave.
        """
        self._together(self._check())

    def logprobs(self, sequences: Sequence[Branch], device: torch.device) -> Tensor:
        """[trained tokens] the teacher's log-probs of the tokens in the loss masks of all sequences, concatenated.
        Collective.

        sequences: of this data-parallel replica.

        Raises LeaveAgreed if a rank is asked to leave.
        """
        found = self._together(self._score(sequences))
        trained = sum(sequence.loss_mask.count(True) for sequence in sequences)
        scores = torch.tensor(found, dtype=torch.float32) if self._asks else torch.zeros(trained)
        scores = scores.to(device)
        if self._groups.model.rank() == 0:
            dist.broadcast(scores, group=self._groups.context, group_src=0)
        dist.broadcast(scores, group=self._groups.model, group_src=0)
        return scores

    async def _score(self, sequences: Sequence[Branch]) -> list[float]:
        room = asyncio.Semaphore(AT_ONCE)

        async def score(sequence: Branch) -> list[float]:
            if not any(sequence.loss_mask):
                return []
            async with room:
                found = [0.0, *await self._served.score(sequence.tokens)]
            return [*compress(found, sequence.loss_mask)]

        parts = await asyncio.gather(*map(score, sequences))
        return [value for part in parts for value in part]

    async def _check(self) -> list[float]:
        try:
            return await self._served.score([self._end, self._last_token, self._end])
        except (EndpointError, UnusableAnswer, PromptTooLong) as error:
            if isinstance(error, EndpointAway):
                raise
            raise ConfigurationError(
                f"distill.server: the server cannot report the log-prob of token {self._last_token}, the last one of "
                f"the policy's tokenizer: {error}"
            ) from error

    def _together(self, work: Coroutine[Any, Any, list[float]]) -> list[float]:
        """Do the work on the ranks that ask while the others wait; return its result there, and nothing elsewhere.
        Collective. Raises LeaveAgreed, with the work cancelled."""
        task: Future[list[float]] | None = None
        if self._asks:
            task = asyncio.run_coroutine_threadsafe(work, self._loop)
        else:
            work.close()
        seen = -1.0
        try:
            while self._safe_points.maximum(torch.tensor([_waits(task)], dtype=torch.int32)).item():
                if self._served.busy_s != seen:  # another sequence is scored
                    seen = self._served.busy_s
                    self._safe_points.activity.beat()
        except BaseException:
            if task is not None:
                task.cancel()
            raise
        return task.result() if task is not None else []


def _waits(task: Future[list[float]] | None) -> bool:
    """Whether a task is unfinished, after at most POLL_S seconds. Raises its exception."""
    if task is None:
        return False
    try:
        task.result(POLL_S)
    except TimeoutError:
        return not task.done()
    return False


def endpoints_of(servers: TeacherServers) -> list[Endpoint]:
    """Return the endpoint of each server. A request to one is tried once, since another one may answer."""
    return [
        Endpoint(
            url=url,
            model=servers.model,
            kind=servers.kind,
            token_file=None if servers.token_file is None else Path(servers.token_file).expanduser(),
            token_variable=servers.token_variable,
            timeout_s=servers.answer_limit_s,
            attempts=1,
        )
        for url in servers.urls
    ]
