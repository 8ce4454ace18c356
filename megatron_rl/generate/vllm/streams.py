"""Unfinished requests of a replica as streams of vLLM, in one asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial

from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.engine.request_limits import refuse_duplicate
from megatron_rl.generate.vllm.checked_answers import VllmAnswer, begun, shared_streams
from megatron_rl.generate.vllm.client import NewTokens
from megatron_rl.generate.vllm.process import VllmGone
from megatron_rl.generate.vllm.running import RunningVllm
from megatron_rl.model.choice_form import ChoiceForm
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.inference import ends_of

REPORT_EVERY_S = 1.0
"""Seconds between two reports of unfinished answers."""


class AskedVllm:
    """Implements `OpenRequest`. Finished answers are reported at once, the others every REPORT_EVERY_S."""

    def __init__(self, answers: list[VllmAnswer], news: asyncio.Event, close: Callable[[], None]) -> None:
        self.answers, self.news, self.close = answers, news, close
        self.reports = False

    @property
    def answered(self) -> bool:
        return all(answer.left for answer in self.answers)

    def unread(self) -> list[Delta]:
        reports, self.reports = self.reports, False
        found = (answer.delta() for answer in self.answers if reports or answer.ended)
        return [delta for delta in found if delta is not None]


class Streams:
    def __init__(
        self, vllm: RunningVllm, tokenizer: Tokenizer, most_samples: int, form: ChoiceForm | None = None
    ) -> None:
        """
        vllm: fails if a stream does, since another replica can continue its answers.
        most_samples: answers that one request to vLLM may ask for.
        form: of the choices of experts that it returns; None: it returns none.
        """
        self.busy_s = 0.0
        self._vllm, self._tokenizer, self._most_samples, self._form = vllm, tokenizer, most_samples, form
        self._asked: dict[str, AskedVllm] = {}
        self._came_at = time.monotonic()  # time of the last tokens, or of the first request
        self._report: asyncio.TimerHandle | None = None  # next report of unfinished answers
        self._label = -1  # version of the weights that sample now
        self._checked = True  # whether those weights were checked
        self._rests = False  # until the next label
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the answer's id()

    @property
    def busy(self) -> bool:
        """Whether tokens are expected."""
        return not self._rests and any(not answer.left for answer in self._answers())

    @property
    def unfinished(self) -> int:
        """Answers that vLLM has not ended."""
        return sum(not answer.ended for answer in self._answers())

    def add(self, request: GenerationRequest, news: asyncio.Event) -> AskedVllm:
        """Have vLLM answer a request. Raises ValueError if it is there already."""
        refuse_duplicate(request, self._asked)
        if not self._asked:
            self._came_at = time.monotonic()
        answers = begun(request, self._tokenizer.end_ids, self._tokenizer.decode)
        asked = self._asked[request.id] = AskedVllm(answers, news, partial(self._drop, request.id))
        if any(answer.ended for answer in answers):
            news.set()
        self._begin(answers)
        return asked

    def rest(self) -> None:
        """vLLM samples nothing until the next label. Unfinished answers stay where they are."""
        self._rests = True

    def label(self, version: int, *, checked: bool) -> None:
        """Tokens that come from now on are of this version, and leave once its weights are checked."""
        self._label, self._checked = version, checked
        if self._rests:
            self._rests, self._came_at = False, time.monotonic()

    def check(self) -> None:
        self._checked = True
        for answer in self._answers():
            answer.check()
        self._tell(reports=False)

    async def restart(self) -> None:
        """Drop the tokens that were not checked, and let vLLM continue from the others."""
        # Ending the streams gives up the loop, and a driver may use that moment: a request that it cancels must not
        # begin again, and one that it adds has already begun with the new weights. So only requests that were there
        # before, and still are, continue. The same id may be there twice in a row, as another object.
        before = [*self._asked.items()]
        await self.end()
        for request_id, asked in before:
            if self._asked.get(request_id) is asked:
                for answer in asked.answers:
                    answer.drop_unchecked()
                    if answer.known and answer.transcript.request.grammar:
                        raise VllmGone(
                            "vLLM cannot resume an answer in a given form: it begins again on another replica"
                        )
                self._begin(asked.answers)

    async def end(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _answers(self) -> Iterator[VllmAnswer]:
        return (answer for asked in self._asked.values() for answer in asked.answers)

    def _drop(self, request_id: str) -> None:
        if (asked := self._asked.pop(request_id, None)) is not None:
            for answer in asked.answers:
                if not answer.ended and (task := self._tasks.get(id(answer))) is not None:
                    task.cancel()

    def _begin(self, answers: Sequence[VllmAnswer]) -> None:
        for together in shared_streams(answers, self._most_samples):
            task = asyncio.ensure_future(self._stream(together))
            for answer in together:
                self._tasks[id(answer)] = task
            task.add_done_callback(partial(self._forget, together))

    def _forget(self, answers: Sequence[VllmAnswer], task: asyncio.Task[None]) -> None:
        for answer in answers:
            if self._tasks.get(id(answer)) is task:
                del self._tasks[id(answer)]

    async def _stream(self, answers: Sequence[VllmAnswer]) -> None:
        first = answers[0]
        request = first.transcript.request
        ends = ends_of(request.sampling, self._tokenizer.end_ids)
        pieces = self._vllm.client.generate(
            first.prompt, request.sampling, ends, len(answers), first.known, self._form, request.grammar
        )
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._take(answers[piece.sample], piece)
                    if all(answer.ended for answer in answers):
                        return
        except Exception as error:  # noqa: BLE001 - raised where the replica is watched
            self._vllm.fail(error)

    def _take(self, answer: VllmAnswer, piece: NewTokens) -> None:
        answer.take(piece, self._label, checked=self._checked)
        now = time.monotonic()
        self.busy_s += now - self._came_at
        self._came_at = now
        self._vllm.activity.beat()
        if answer.ended:
            self._tell(reports=False)
        elif self._report is None:
            self._report = asyncio.get_running_loop().call_later(REPORT_EVERY_S, self._tell)

    def _tell(self, *, reports: bool = True) -> None:
        """Have results read. reports: also of unfinished answers."""
        if reports:
            self._report = None
        for asked in self._asked.values():
            asked.reports = asked.reports or reports
            asked.news.set()
