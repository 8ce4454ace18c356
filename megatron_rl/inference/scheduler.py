"""Assign requests to rows and pages, and plan what all ranks of a replica compute next.

    submit() -> waiting -> admit(): one prefill per prompt, a row per sample -> decode(): all rows together
                   ^                                                                    |
                   +---- evict(): no page is left -------+---- retire(): freed rows ----+

Rows 0..n-1 are being decoded. If no waiting sample takes the row of a finished one, the next plan moves the last row
there, so a step never computes a row that is known to have ended. Example: of rows 0..3, row 1 ends; the next plan
moves row 3 to row 1 and decodes rows 0..2.

A row gets a page when it needs one. If none is left, the youngest row gives up its pages and waits at the front of the
queue, to resume from its tokens. So the oldest row always advances.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_rl.inference.admission import Admission, Branch, PendingRequest, Prefill, Row
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
from megatron_rl.inference.request_limits import refuse_duplicate
from megatron_rl.inference.text import Decode
from megatron_rl.inference.transcript import RowAnswer, Transcript


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass of the model. It has everything that a rank does not know from earlier plans."""

    moves: list[tuple[int, int]]
    """(from, to): rows to move first."""
    pages: list[tuple[int, int, int]]
    """(row, index, page): new pages of rows, and their index among the row's pages."""
    rows: range
    prefills: list[Prefill]


class Scheduler:
    """Requests by id on their way through the rows of one replica. Needs no tensors, clock or model."""

    def __init__(
        self, config: InferenceConfig, pages: Pages, end_ids: Iterable[int], decode: Decode | None = None
    ) -> None:
        """
        end_ids: tokens that end any answer.
        decode: finds stop strings in the text.
        """
        self.policy_version = 0
        self._pages = pages
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._pending: dict[str, PendingRequest] = {}
        self._waiting = Admission(config, pages)
        self._rows: dict[int, Row] = {}
        self._freed: list[int] = []  # rows that ended since the last plan
        self._followed: set[int] = set()  # rows whose tokens are needed before they end
        self._decoded = 0  # number of decoding steps so far
        self._due: dict[int, list[Row]] = {}  # decoding step -> rows that need another page for it
        self.answered: dict[str, list[Completion]] = {}
        """Completions in sample order, by request id. The reader removes them."""
        self.deltas: list[tuple[str, Delta]] = []
        """New tokens of streamed requests, with the request ids. The reader removes them."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows)

    @property
    def rows(self) -> list[int]:
        return list(self._rows)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self._rows), self._waiting.samples, self._pages.available, self._pages.count)

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts and of resumed answers computed so far; tokens found in the cache do not count."""
        return self._waiting.prefilled_tokens

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> None:
        """Queue all samples of a request. Samples whose known tokens are complete finish at once.

        streamed: report deltas instead of completions.

        Raises ValueError if a request with this id is already here.
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
                self._report(pending, answer)

    def cancel(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        self.answered.pop(request_id, None)
        if pending is None:
            return
        self._waiting.cancel(pending)
        self._free([row for row, content in self._rows.items() if content.pending is pending])

    def clear(self) -> None:
        """Forget all requests, and all prefixes that the pages hold."""
        for request_id in list(self._pending):
            self.cancel(request_id)
        self.forget()

    def forget(self) -> None:
        """Forget cached prefixes: requests from here on recompute them."""
        self._waiting.release_pages()
        self._pages.forget()

    # Plans

    def row_to_evict(self) -> int | None:
        """Return the row that must give up its pages before the others can be decoded; None if there are enough."""
        needed = sum(not row.ended for row in self._due.get(self._decoded + 1, ()))
        if needed > self._pages.available:
            self._waiting.release_pages()
        if needed <= self._pages.available:
            return None
        return max(self._rows, key=lambda row: self._rows[row].age)

    def evict(self, number: int, answers: Iterable[RowAnswer]) -> None:
        """Make a row wait, to resume from its tokens. `answers` go to `retire`."""
        row = self._rows[number]
        self.retire(answers)
        if not row.ended:
            self._free([number])
            self._waiting.put_back(row)

    def restart_rows(self, answers: Iterable[RowAnswer]) -> None:
        """Make all rows wait, to resume from their tokens. `answers` go to `retire`."""
        self.retire(answers)
        for number, row in sorted(self._rows.items(), key=lambda item: item[1].age, reverse=True):
            self._free([number])
            self._waiting.put_back(row)

    def decode(self) -> StepPlan | None:
        """Plan the next token of every row; None if there are no rows. `row_to_evict` must have returned None."""
        if not self._rows:
            self._due.clear()
            return None
        moves = self._close_gaps()
        self._decoded += 1
        return StepPlan(moves, self._new_pages(), range(len(self._rows)), [])

    def admit(self) -> StepPlan | None:
        """Plan the prefill of waiting samples for the free rows; None if none waits or none fits."""
        prefills, begun = self._waiting.begin(self._rows.values())
        if not prefills:
            return None
        moves = self._close_gaps()
        first = len(self._rows)
        for number, row in enumerate(begun, first):
            self._fill(number, row)
            self._note_due(row, len(row.pages) * self._pages.tokens - row.cached + 1)
        return StepPlan(moves, [], range(first, len(self._rows)), prefills)

    def _new_pages(self) -> list[tuple[int, int, int]]:
        due = [row for row in self._due.pop(self._decoded, ()) if not row.ended]
        if not due:
            return []
        numbers = {row: number for number, row in self._rows.items()}
        given = []
        for row, page in zip(due, self._pages.take(len(due)), strict=True):
            given.append((numbers[row], len(row.pages), page))
            row.pages.append(page)
            self._note_due(row, self._pages.tokens)
        return given

    def _note_due(self, row: Row, steps: int) -> None:
        if row.grows:
            self._due.setdefault(self._decoded + steps, []).append(row)

    def _close_gaps(self) -> list[tuple[int, int]]:
        """Move the last rows to the numbers of those that ended, so that the rows are 0..n-1 again."""
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
        """Return the rows whose tokens `retire` needs, and how many tokens of each are already known: rows that have
        ended, and rows whose tokens are needed before they end."""
        return {row: len(self._rows[row].answer.tokens) for row in sorted({*ended, *self._followed})}

    def retire(self, answers: Iterable[RowAnswer]) -> None:
        """Add new tokens to the rows' answers, and free the rows whose answers are finished."""
        finished = []
        for each in answers:
            row = self._rows[each.row]
            row.answer.extend(each, self.policy_version)
            if row.answer.finish_reason is None:
                self._report(row.pending, row.answer)
            else:
                self._finish(row.pending, row.answer)
                finished.append(each.row)
        self._free(finished)

    def take_scores(self, scores: PromptScores) -> None:
        assert self._waiting.scoring is not None
        pending, start = self._waiting.scoring
        pending.take_scores(start, scores)

    def partial_answers(self, answers: Iterable[RowAnswer]) -> list[PartialAnswer]:
        """Return all samples of unanswered requests that have tokens. `answers` has the new tokens of all rows."""
        self._take(answers)
        begun = [row.answer for row in self._rows.values()]
        finished = [answer for pending in self._pending.values() for answer in pending.finished.values()]
        return [
            PartialAnswer(answer.request.id, answer.sample, answer.prefix())
            for answer in begun + self._waiting.interrupted + finished
        ]

    def publish(self, policy_version: int, answers: Iterable[RowAnswer]) -> None:
        """Note that the weights are now of `policy_version`. `answers` has the new tokens of all rows, sampled by the
        previous weights."""
        self._take(answers)
        self.policy_version = policy_version
        for row in self._rows.values():
            row.current = False
        self.forget()

    def _take(self, answers: Iterable[RowAnswer]) -> None:
        for each in answers:
            self._rows[each.row].answer.extend(each, self.policy_version)

    def _report(self, pending: PendingRequest, answer: Transcript) -> None:
        if pending.streamed and (answer.reported < len(answer.tokens) or answer.finish_reason is not None):
            first = answer.reported == 0 and pending.request.prompt_logprobs is not None
            self.deltas.append((pending.request.id, answer.delta(pending.scores if first else None)))

    def _finish(self, pending: PendingRequest, answer: Transcript) -> None:
        """Record a finished sample. The last sample of a request answers it."""
        self._report(pending, answer)
        pending.finished[answer.sample] = answer
        if len(pending.finished) == pending.request.num_samples:
            del self._pending[pending.request.id]
            if not pending.streamed:
                answers = (pending.finished[sample] for sample in range(pending.request.num_samples))
                scores = None if pending.request.prompt_logprobs is None else pending.scores
                self.answered[pending.request.id] = [answer.completion(scores) for answer in answers]

    def _free(self, numbers: Iterable[int]) -> None:
        """Stop decoding these rows. Their full pages stay findable; the newest token is not in the cache yet."""
        for number in numbers:
            row = self._rows.pop(number)
            row.ended = True
            prompt, answer = row.pending.request.prompt_tokens, row.answer.tokens
            if row.current and len(prompt) + len(answer) > self._pages.tokens:  # else no page is full
                self._pages.name(prompt + answer[:-1], row.pages)
            self._pages.release(row.pages)
            self._followed.discard(number)
            self._freed.append(number)
