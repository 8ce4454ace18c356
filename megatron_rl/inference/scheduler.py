"""Which request is answered in which row and on which pages, and what all ranks of a replica compute next.

    submit() -> waiting -> admit(): one prefill per prompt, a row per sample -> decode(): all rows together
                   ^                                                                    |
                   +---- give_way(): no page is left ----+---- retire(): freed rows ----+

Rows 0..n-1 are being decoded. Where no waiting request takes the row of an ended sample, the last row moves into its
place with the next plan, so a step computes on no row that is known to have ended.

A row gets a page when it needs one. Where none is left the youngest row gives its pages up and waits, before all that
have not begun, to go on from its tokens: so the oldest always gets on.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.inference.admission import Admission, Branch, PendingRequest, Row
from megatron_rl.inference.api import (
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    PromptScores,
)
from megatron_rl.inference.config import InferenceConfig, ends_of
from megatron_rl.inference.pages import Pages
from megatron_rl.inference.plans import StepPlan
from megatron_rl.inference.request_limits import refuse_duplicate
from megatron_rl.inference.text import Decode
from megatron_rl.inference.transcript import RowAnswer, Transcript


class Scheduler:
    """Requests by id on their way through the rows of one replica. Knows no tensor, no clock and no model."""

    def __init__(
        self, config: InferenceConfig, pages: Pages, end_ids: Iterable[int], decode: Decode | None = None
    ) -> None:
        """
        pages: of the cache.
        end_ids: tokens that end any answer.
        decode: to look for stop strings with.
        """
        self.policy_version = 0
        self._pages = pages
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._pending: dict[str, PendingRequest] = {}
        self._waiting = Admission(config, pages)
        self._rows: dict[int, Row] = {}
        self._freed: list[int] = []  # rows that ended since the last plan
        self._followed: set[int] = set()  # rows whose tokens somebody waits for
        self._decoded = 0
        self._due: dict[int, list[Row]] = {}  # by number of the decoding step for which they need another page
        self.answered: dict[str, list[Completion]] = {}
        """Completions, in sample order, by id of the request; whoever takes one removes it."""
        self.deltas: list[tuple[str, Delta]] = []
        """What streamed requests have got, by their ids; whoever delivers them removes them."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._waiting or self._rows)

    @property
    def rows(self) -> list[int]:
        """Those being decoded."""
        return list(self._rows)

    @property
    def load(self) -> EngineLoad:
        """How much there is to do, and how full the cache is."""
        return EngineLoad(len(self._rows), self._waiting.samples, self._pages.available, self._pages.count)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts, and of answers that were gone on with, that were computed so far."""
        return self._waiting.prefilled_tokens

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> None:
        """Queue all samples of a request; those that are known to their end are finished at once.

        streamed: told of as deltas, instead of as completions.

        Raises ValueError where it is here already.
        """
        refuse_duplicate(request, self._pending)
        refuse_duplicate(request, self.answered)
        end_ids = frozenset(ends_of(request.sampling, self._end_ids))
        samples = [Transcript.begin(request, sample, end_ids, self._decode) for sample in range(request.num_samples)]
        pending = self._pending[request.id] = PendingRequest(request, streamed)
        if fresh := [answer for answer in samples if not answer.tokens]:
            self._waiting.append(Branch(pending, fresh))
        for answer in samples:
            if answer.finish_reason is not None:
                self._finish(pending, answer)
            elif answer.tokens:
                self._waiting.append(Branch(pending, [answer]))
                self._tell(pending, answer)

    def cancel(self, request_id: str) -> None:
        """Forget a request: nobody waits for it any more. One that is answered or unknown is none."""
        pending = self._pending.pop(request_id, None)
        self.answered.pop(request_id, None)
        if pending is None:
            return
        self._waiting.cancel(pending)
        self._free([row for row, content in self._rows.items() if content.pending is pending])

    def clear(self) -> None:
        """Forget everything, what the pages hold included."""
        for request_id in list(self._pending):
            self.cancel(request_id)
        self.forget()

    def forget(self) -> None:
        """What begins from here on finds nothing of what came before."""
        self._waiting.give_pages_back()
        self._pages.forget()

    # Plans

    def must_give_way(self) -> int | None:
        """The row that is to give its pages up, before the others can be decoded; None where there are enough."""
        needed = sum(not row.ended for row in self._due.get(self._decoded + 1, ()))
        if needed > self._pages.available:
            self._waiting.give_pages_back()
        if needed <= self._pages.available:
            return None
        return max(self._rows, key=lambda place: self._rows[place].age)

    def give_way(self, place: int, answers: Iterable[RowAnswer]) -> None:
        """Have a row wait, to go on from what it has sampled; `answers` are for `retire`."""
        row = self._rows[place]
        self.retire(answers)
        if not row.ended:
            self._free([place])
            self._waiting.put_back(row)

    def begin_rows_again(self, answers: Iterable[RowAnswer]) -> None:
        """Have all rows wait, to go on from what they have sampled; `answers` are for `retire`."""
        self.retire(answers)
        for place in sorted(self._rows, key=lambda place: self._rows[place].age, reverse=True):
            row = self._rows[place]
            self._free([place])
            self._waiting.put_back(row)

    def decode(self) -> StepPlan | None:
        """The next token of every row, none of which must give way; None where there is none."""
        if not self._rows:
            self._due.clear()
            return None
        moves = self._close_gaps()
        self._decoded += 1
        return StepPlan(moves, self._new_pages(), range(len(self._rows)), [])

    def admit(self) -> StepPlan | None:
        """Waiting samples for the free rows, and their next token; None where none waits or there is no room."""
        prefills, begun = self._waiting.begin(self._rows.values())
        if not prefills:
            return None
        moves = self._close_gaps()
        first = len(self._rows)
        for place, row in enumerate(begun, first):
            self._fill(place, row)
            self._note_due(row, len(row.pages) * self._pages.tokens - row.cached + 1)
        return StepPlan(moves, [], range(first, len(self._rows)), prefills)

    def _new_pages(self) -> list[tuple[int, int, int]]:
        """For the rows whose next token has no place."""
        due = [row for row in self._due.pop(self._decoded, ()) if not row.ended]
        if not due:
            return []
        places = {row: place for place, row in self._rows.items()}
        given = []
        for row, page in zip(due, self._pages.take(len(due)), strict=True):
            given.append((places[row], len(row.pages), page))
            row.pages.append(page)
            self._note_due(row, self._pages.tokens)
        return given

    def _note_due(self, row: Row, steps: int) -> None:
        """After so many steps of decoding it needs another page, if ever."""
        if row.grows:
            self._due.setdefault(self._decoded + steps, []).append(row)

    def _close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows into the places of those that ended, so that the rows are 0..n-1 again."""
        left = len(self._rows)
        movers = [row for row in range(left, left + len(self._freed)) if row in self._rows]
        moves = list(zip(movers, sorted(row for row in self._freed if row < left), strict=True))
        self._freed = []
        for source, target in moves:
            self._fill(target, self._rows.pop(source))
            self._followed.discard(source)
        return moves

    def _fill(self, number: int, row: Row) -> None:
        self._rows[number] = row
        if row.followed:
            self._followed.add(number)

    # Answers

    def wanted(self, ended: Iterable[int]) -> dict[int, int]:
        """Rows whose tokens `retire` takes: those that have ended and those that somebody follows; and of each, how
        many are known already."""
        return {row: len(self._rows[row].answer.tokens) for row in sorted({*ended, *self._followed})}

    def retire(self, answers: Iterable[RowAnswer]) -> None:
        """Take over tokens of rows, and free those whose answers have their last one."""
        gone = []
        for each in answers:
            row = self._rows[each.row]
            row.answer.extend(each, self.policy_version)
            if row.answer.finish_reason is None:
                self._tell(row.pending, row.answer)
            else:
                self._finish(row.pending, row.answer)
                gone.append(each.row)
        self._free(gone)

    def take_scores(self, scores: PromptScores) -> None:
        """Take over what the newest plan has found of a prompt."""
        assert self._waiting.scoring is not None
        pending, start = self._waiting.scoring
        pending.take_scores(start, scores)

    def partial_answers(self, answers: Iterable[RowAnswer]) -> list[PartialAnswer]:
        """All samples of unanswered requests that have tokens; `answers` is what all rows have sampled since."""
        self._take(answers)
        begun = [row.answer for row in self._rows.values()]
        finished = [answer for pending in self._pending.values() for answer in pending.finished.values()]
        return [
            PartialAnswer(answer.request.id, answer.sample, answer.prefix())
            for answer in begun + self._waiting.interrupted + finished
        ]

    def publish(self, policy_version: int, answers: Iterable[RowAnswer]) -> None:
        """From here on the weights are those of `policy_version`; `answers` is what all rows have sampled since, by the
        ones before."""
        self._take(answers)
        self.policy_version = policy_version
        for row in self._rows.values():
            row.current = False
        self.forget()

    def _take(self, answers: Iterable[RowAnswer]) -> None:
        for each in answers:
            self._rows[each.row].answer.extend(each, self.policy_version)

    def _tell(self, pending: PendingRequest, answer: Transcript) -> None:
        if pending.streamed and (answer.told < len(answer.tokens) or answer.finish_reason is not None):
            first = answer.told == 0 and pending.request.prompt_logprobs is not None
            self.deltas.append((pending.request.id, answer.delta(pending.scores if first else None)))

    def _finish(self, pending: PendingRequest, answer: Transcript) -> None:
        """A sample has its last token. With the last sample the request is answered."""
        self._tell(pending, answer)
        pending.finished[answer.sample] = answer
        if len(pending.finished) == pending.request.num_samples:
            del self._pending[pending.request.id]
            if not pending.streamed:
                answers = (pending.finished[sample] for sample in range(pending.request.num_samples))
                scores = None if pending.request.prompt_logprobs is None else pending.scores
                self.answered[pending.request.id] = [answer.completion(scores) for answer in answers]

    def _free(self, places: Iterable[int]) -> None:
        """Rows that are decoded no more. What their pages hold may be found again: all tokens but the newest."""
        for place in places:
            row = self._rows.pop(place)
            row.ended = True
            prompt, answer = row.pending.request.prompt_tokens, row.answer.tokens
            if row.current and len(prompt) + len(answer) > self._pages.tokens:  # else no page is full
                self._pages.name(prompt + answer[:-1], row.pages)
            self._pages.release(row.pages)
            self._followed.discard(place)
            self._freed.append(place)
