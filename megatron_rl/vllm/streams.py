"""Unfinished answers of a replica as streams of vLLM."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial

from megatron_rl.inference.api import Delta, GenerationRequest
from megatron_rl.inference.config import ends_of
from megatron_rl.inference.request_limits import refuse_duplicate
from megatron_rl.inference.text import Decode
from megatron_rl.vllm.answers import Answer, Answers, shared_streams
from megatron_rl.vllm.client import Piece, VllmClient

logger = logging.getLogger("megatron_rl")


class Streams:
    """Coroutines, and methods that say so, belong to the loop of the client; all others to any thread."""

    def __init__(
        self,
        client: VllmClient,
        end_ids: Collection[int],
        decode: Decode,
        most_samples: int,
        fail: Callable[[Exception], None],
    ) -> None:
        """
        end_ids, decode: the tokenizer's.
        most_samples: answers that one request to vLLM may ask for.
        fail: takes an error that ends the replica, since another one can continue its answers. Called in the loop.
        """
        self.busy_s = 0.0
        self.came_at = time.monotonic()
        """Time of the last tokens, or of the first request."""
        self.news = threading.Event()
        """Set when tokens have come or may leave."""
        self._client, self._end_ids, self._most_samples, self._fail = client, end_ids, most_samples, fail
        self._lock = threading.Lock()
        self._answers = Answers(end_ids, decode)
        self._label = -1  # version of the weights that sample now
        self._checked = True  # whether those weights were checked
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the answer's id(); for the loop

    @property
    def busy(self) -> bool:
        """Whether answers have not left."""
        with self._lock:
            return any(not answer.left for answer in self._answers)

    @property
    def unfinished(self) -> int:
        """Answers that vLLM has not ended."""
        with self._lock:
            return sum(not answer.ended for answer in self._answers)

    def add(self, request: GenerationRequest) -> list[Answer]:
        """Add a request, whose answers the loop must begin. Raises ValueError if it is there already."""
        with self._lock:
            refuse_duplicate(request, self._answers)
            if not any(True for _ in self._answers):
                self.came_at = time.monotonic()
            return self._answers.begin(request)

    def drop(self, request_id: str) -> list[Answer]:
        """Forget a request, whose answers the loop must end."""
        with self._lock:
            return self._answers.drop(request_id)

    def deltas(self, *, unfinished: bool) -> list[tuple[str, Delta]]:
        """New tokens that may leave; see Answers.deltas."""
        with self._lock:
            return self._answers.deltas(unfinished=unfinished)

    def begin(self, answers: Sequence[Answer]) -> None:
        """Have vLLM continue answers. In the loop."""
        for together in shared_streams(answers, self._most_samples):
            task = asyncio.ensure_future(self._stream(together))
            for answer in together:
                self._tasks[id(answer)] = task
            task.add_done_callback(partial(self._forget, together))

    def end(self, answers: Sequence[Answer]) -> None:
        """Cancel answers. In the loop."""
        for answer in answers:
            if (task := self._tasks.get(id(answer))) is not None:
                task.cancel()

    def label(self, version: int, *, checked: bool) -> None:
        """Tokens that come from now on are of this version, and leave once its weights are checked."""
        with self._lock:
            self._label, self._checked = version, checked

    def check(self) -> None:
        """The weights are the trainer's: all tokens may leave."""
        with self._lock:
            self._checked = True
            for answer in self._answers:
                answer.check()
        self.news.set()

    async def restart(self) -> None:
        """Drop the tokens that were not checked, and let vLLM continue from the others."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with self._lock:
            for answer in self._answers:
                answer.drop_unchecked()
            answers = [*self._answers]
        self.begin(answers)

    def _forget(self, answers: Sequence[Answer], task: asyncio.Task[None]) -> None:
        for answer in answers:
            if self._tasks.get(id(answer)) is task:
                del self._tasks[id(answer)]

    async def _stream(self, answers: Sequence[Answer]) -> None:
        """Take the tokens of answers that continue one prompt."""
        first = answers[0]
        sampling = first.transcript.request.sampling
        ends = ends_of(sampling, self._end_ids)
        pieces = self._client.generate(first.prompt, sampling, ends, len(answers), first.known)
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._take(answers[piece.sample], piece)
                    if all(answer.ended for answer in answers):
                        return
        except Exception as error:  # noqa: BLE001 - raised where the replica is driven
            self._fail(error)

    def _take(self, answer: Answer, piece: Piece) -> None:
        with self._lock:
            answer.take(piece, self._label, checked=self._checked)
            now = time.monotonic()
            self.busy_s += now - self.came_at
            self.came_at = now
        if answer.relabelled and piece.versions is not None:
            logger.warning("%d tokens left under another policy version than vLLM's", answer.relabelled)
        self.news.set()
