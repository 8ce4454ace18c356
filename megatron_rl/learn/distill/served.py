"""A teacher on servers, or on replicas that the run has started."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from itertools import compress
from pathlib import Path
from typing import Any, NoReturn

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.agent.trajectories import Branch
from megatron_rl.algorithms.divergences import TopTokens
from megatron_rl.generate.engine.interface import TokenScore
from megatron_rl.generate.engine.openai import Endpoint, EndpointAway, EndpointError, ScoringServers
from megatron_rl.generate.replicas.fixed_replicas import Running
from megatron_rl.learn.training.objective import FirstPass, Judgement
from megatron_rl.learn.training.training_batch import trained_index
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.safe_points import POLL_S, SafePoints
from megatron_rl.recipe.distill import TeacherServers
from megatron_rl.recipe.errors import ConfigurationError

logger = logging.getLogger(__name__)

LEAST = 1e-7  # probability of all tokens but the likeliest ones together, at least
AT_ONCE = 64  # most sequences that one data-parallel replica has at the servers at a time
LOOK_S = 1.0  # seconds between two looks for replicas that have started


def endpoints_of(servers: TeacherServers) -> list[Endpoint]:
    token_file = None if servers.token_file is None else Path(servers.token_file).expanduser()
    return [
        Endpoint(url, servers.model, token_file, servers.token_variable, servers.answer_limit_s) for url in servers.urls
    ]


class ServedTeacher:
    """Asks servers for log-probs, those of others or replicas of the run. The first rank of each data-parallel replica
    asks for the replica's sequences, and the others get its answers."""

    def __init__(
        self,
        servers: Sequence[Endpoint] | Running,
        tokenizer: Tokenizer,
        groups: Groups,
        safe_points: SafePoints,
        limit_s: float,
        *,
        top_k: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        servers: endpoints of the servers; or of the replicas that run now, which is asked again and again in a separate
            thread, and raises FixedModelLost if none will run any more.
        limit_s: seconds that all servers may be away.
        top_k: likeliest tokens at each position whose log-probs are asked for too; None: none.
        transport: for tests.
        """
        self._top_k = top_k
        self._running = servers if callable(servers) else None
        self._groups, self._safe_points = groups, safe_points
        self._asks = groups.model.rank() == 0 and groups.context.rank() == 0
        fixed = () if callable(servers) else servers
        self._served = ScoringServers(fixed, limit_s, transport=transport)
        self._last_token, self._end = tokenizer.vocab_size - 1, tokenizer.eos_id
        self._loop = asyncio.new_event_loop()
        if self._asks:
            threading.Thread(target=self._loop.run_forever, name="teacher", daemon=True).start()

    def check(self) -> None:
        """Wait until a server answers, and check that it knows the policy's last token. Collective.

        Raises ConfigurationError, or LeaveAgreed if a rank is asked to leave.
        """
        self._together(self._check())

    def __call__(self, first_pass: FirstPass) -> Judgement:
        """Judge the chosen sequences. Collective. Raises LeaveAgreed if a rank is asked to leave."""
        batch, device = first_pass.batch, first_pass.batch.inference_logprobs.device
        chosen = range(len(batch.sequences)) if first_pass.chosen is None else first_pass.chosen
        logprobs, top = self.judged([batch.sequences[at] for at in chosen], device)
        whole = torch.zeros_like(batch.inference_logprobs)
        whole[trained_index(batch.lengths, chosen).to(device)] = logprobs
        return Judgement(whole, top)

    def judged(self, sequences: Sequence[Branch], device: torch.device) -> tuple[Tensor, TopTokens | None]:
        """Return the teacher's log-probs of the tokens in the loss masks of all sequences, concatenated,
        [trained tokens], and with `top_k` its likeliest tokens there. Collective.

        sequences: of this data-parallel replica.

        Raises LeaveAgreed if a rank is asked to leave.
        """
        found = self._together(self._score(sequences))
        trained, count = sum(sequence.loss_mask.count(True) for sequence in sequences), self._top_k
        logprobs = self._shared([each.logprob for each in found], (trained,), torch.float32, device)
        if count is None:
            return logprobs, None
        tokens = self._shared([each.tokens for each in found], (trained, count), torch.int32, device)
        likeliest = self._shared([each.logprobs for each in found], (trained, count), torch.float32, device)
        # Their probabilities may add up to 1 by rounding.
        others = torch.log1p(-likeliest.double().exp().sum(1).clamp(max=1 - LEAST)).float()
        return logprobs, TopTokens(tokens.cpu(), torch.cat((likeliest, others[:, None]), 1).cpu())

    def _shared(self, found: Sequence[Any], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return on all ranks of the replica what the first of them has found. Collective."""
        values = torch.tensor(found, dtype=dtype).reshape(shape) if self._asks else torch.zeros(shape, dtype=dtype)
        values = values.to(device)
        if self._groups.model.rank() == 0:
            dist.broadcast(values, group=self._groups.context, group_src=0)
        dist.broadcast(values, group=self._groups.model, group_src=0)
        return values

    async def _score(self, sequences: Sequence[Branch]) -> list[TokenScore]:
        room = asyncio.Semaphore(AT_ONCE)

        async def score(sequence: Branch) -> list[TokenScore]:
            if not any(sequence.loss_mask):
                return []
            async with room:
                found = await self._served.score(sequence.tokens, self._top_k or 0)
            return [*compress(found, sequence.loss_mask[1:])]

        parts = await asyncio.gather(*map(score, sequences))
        return [value for part in parts for value in part]

    async def _check(self) -> list[TokenScore]:
        try:
            return await self._served.score([self._end, self._last_token, self._end], self._top_k or 0)
        except EndpointAway:
            raise
        except EndpointError as error:
            key = "distill.replicas" if self._running else "distill.server"
            further = f" and of the {self._top_k} likeliest ones (distill.divergence.top_k)" if self._top_k else ""
            raise ConfigurationError(
                f"{key}: the server cannot report the log-prob of token {self._last_token}, the last one of the "
                f"policy's tokenizer{further}: {error}"
            ) from error

    def _together(self, work: Coroutine[Any, Any, list[TokenScore]]) -> list[TokenScore]:
        """Do the work on the ranks that ask while the others wait; return its result there, and nothing elsewhere.
        Collective. Raises LeaveAgreed, with the work cancelled."""
        task: Future[list[TokenScore]] | None = None
        if self._asks:
            task = asyncio.run_coroutine_threadsafe(self._looking(work), self._loop)
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

    async def _looking(self, work: Coroutine[Any, Any, list[TokenScore]]) -> list[TokenScore]:
        """Do the work, and use the replicas that run meanwhile. Raises FixedModelLost."""
        if self._running is None:
            return await work
        looks = asyncio.ensure_future(self._look(self._running))
        works = asyncio.ensure_future(work)
        try:
            await asyncio.wait([looks, works], return_when=asyncio.FIRST_COMPLETED)
            return works.result() if works.done() else looks.result()
        finally:
            looks.cancel()
            works.cancel()

    async def _look(self, running: Running) -> NoReturn:
        while True:
            self._served.use(await asyncio.to_thread(running))
            await asyncio.sleep(LOOK_S)


def _waits(task: Future[list[TokenScore]] | None) -> bool:
    """Whether a task is unfinished, after at most POLL_S seconds. Raises its exception."""
    if task is None:
        return False
    try:
        task.result(POLL_S)
    except TimeoutError:
        return not task.done()
    return False
