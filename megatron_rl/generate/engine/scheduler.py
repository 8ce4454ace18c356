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

from megatron_rl.generate.engine.admission import Admission, PendingRequest, Prefill, WaitingSamples
from megatron_rl.generate.engine.decoded_rows import DecodedRows
from megatron_rl.generate.engine.interface import (
    Completion,
    Delta,
    EngineLoad,
    GenerationRequest,
    PartialAnswer,
    PromptScores,
)
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.request_limits import refuse_duplicate
from megatron_rl.generate.engine.transcript import Amount, RowAnswer, Transcript
from megatron_rl.model.text_stream import Decode
from megatron_rl.recipe.inference import InferenceConfig, ends_of


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
        self,
        config: InferenceConfig,
        pages: Pages,
        end_ids: Iterable[int],
        decode: Decode | None = None,
        *,
        whole: bool = False,
    ) -> None:
        """
        end_ids: tokens that end any answer.
        decode: finds stop strings in the text.
        whole: see `Admission`.
        """
        self.policy_version = 0
        self._pages = pages
        self._end_ids = frozenset(end_ids)
        self._decode = decode
        self._pending: dict[str, PendingRequest] = {}
        self._waiting = Admission(config, pages, whole=whole)
        self.rows = DecodedRows(pages)
        self.answered: dict[str, list[Completion]] = {}
        """Completions in sample order, by request id. The reader removes them."""
        self.deltas: list[tuple[str, Delta]] = []
        """New tokens of streamed requests, with the request ids. The reader removes them."""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self.rows)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(len(self.rows), self._waiting.samples, self._pages.available, self._pages.count)

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
            self._waiting.append(WaitingSamples(pending, fresh))
        for answer in samples:
            if answer.finish_reason is not None:
                self._finish(pending, answer)
            elif answer.tokens:
                self._waiting.append(WaitingSamples(pending, [answer]))
                self._report(pending, answer)

    def cancel(self, request_id: str) -> None:
        pending = self._pending.pop(request_id, None)
        self.answered.pop(request_id, None)
        if pending is None:
            return
        self._waiting.cancel(pending)
        self.rows.free([number for number in self.rows if self.rows[number].pending is pending])

    def clear(self) -> None:
        for request_id in list(self._pending):
            self.cancel(request_id)
        self.forget()

    def forget(self) -> None:
        self._waiting.release_pages()
        self._pages.forget()

    # Plans

    def row_to_evict(self) -> int | None:
        """Return the row that must give up its pages before the others can be decoded; None if there are enough."""
        needed = self.rows.pages_due
        if needed > self._pages.available:
            self._waiting.release_pages()
        if needed <= self._pages.available:
            return None
        return self.rows.youngest_first()[0]

    def evict(self, number: int, answers: Iterable[RowAnswer]) -> None:
        """Make a row wait, to resume from its tokens. `answers` go to `retire`."""
        row = self.rows[number]
        self.retire(answers)
        if not row.ended:
            self.rows.free([number])
            self._waiting.put_back(row)

    def restart_rows(self, answers: Iterable[RowAnswer]) -> None:
        """Make all rows wait, to resume from their tokens. `answers` go to `retire`."""
        self.retire(answers)
        for number in self.rows.youngest_first():
            row = self.rows[number]
            self.rows.free([number])
            self._waiting.put_back(row)

    def decode(self) -> StepPlan | None:
        """Plan the next token of every row; None without rows. `row_to_evict` must have returned None."""
        if not self.rows:
            return None
        return StepPlan(self.rows.close_gaps(), self.rows.begin_step(), range(len(self.rows)), [])

    def admit(self) -> StepPlan | None:
        """Plan the prefill of waiting samples for the free rows; None if none waits or none fits."""
        prefills, begun = self._waiting.begin(self.rows.values())
        if not prefills:
            return None
        return StepPlan(self.rows.close_gaps(), [], self.rows.add(begun), prefills)

    # Answers

    def wanted(self, ended: Iterable[int]) -> dict[int, Amount]:
        """Return the rows whose tokens `retire` needs, with what the host has of each: rows that have ended, and rows
        whose tokens are needed before they end."""
        return {row: self.rows[row].answer.held for row in sorted({*ended, *self.rows.followed})}

    def retire(self, answers: Iterable[RowAnswer]) -> None:
        """Add new tokens to the rows' answers, and free the rows whose answers are finished."""
        finished = []
        for each in answers:
            row = self.rows[each.row]
            row.answer.extend(each, self.policy_version)
            if row.answer.finish_reason is None:
                self._report(row.pending, row.answer)
            else:
                self._finish(row.pending, row.answer)
                finished.append(each.row)
        self.rows.free(finished)

    def take_scores(self, scores: PromptScores) -> None:
        assert self._waiting.scoring is not None
        pending, start = self._waiting.scoring
        pending.take_scores(start, scores)

    def partial_answers(self, answers: Iterable[RowAnswer]) -> list[PartialAnswer]:
        """Return all samples of unanswered requests that have tokens. `answers` has the new tokens of all rows."""
        self.rows.extend(answers, self.policy_version)
        begun = [row.answer for row in self.rows.values()]
        finished = [answer for pending in self._pending.values() for answer in pending.finished.values()]
        return [
            PartialAnswer(answer.request.id, answer.sample, answer.prefix())
            for answer in begun + self._waiting.interrupted + finished
        ]

    def publish(self, policy_version: int, answers: Iterable[RowAnswer]) -> None:
        """Note that the weights are now of `policy_version`. `answers` has the new tokens of all rows, sampled by the
        previous weights."""
        self.rows.extend(answers, self.policy_version)
        self.policy_version = policy_version
        for row in self.rows.values():
            row.current = False
        self.forget()

    def _report(self, pending: PendingRequest, answer: Transcript) -> None:
        if pending.streamed and (answer.reported.tokens < len(answer.tokens) or answer.finish_reason is not None):
            first = answer.reported.tokens == 0 and pending.request.prompt_logprobs is not None
            self.deltas.append((pending.request.id, answer.delta(pending.scores if first else None)))

    def _finish(self, pending: PendingRequest, answer: Transcript) -> None:
        self._report(pending, answer)
        pending.finished[answer.sample] = answer
        if len(pending.finished) == pending.request.num_samples:
            del self._pending[pending.request.id]
            if not pending.streamed:
                answers = (pending.finished[sample] for sample in range(pending.request.num_samples))
                scores = None if pending.request.prompt_logprobs is None else pending.scores
                self.answered[pending.request.id] = [answer.completion(scores) for answer in answers]
