"""Choose which waiting samples start next: in the order of arrival, as far as rows and pages allow.

A prompt longer than one prefill is computed in pieces, and rows are decoded in between. All samples of a prompt share
its full pages, and use cached pages of other sequences with the same prefix. Each sample has its own copy of the last,
partly filled page; one pass writes all copies. Example with pages of 16 tokens: four samples of a prompt of 40 tokens
share two full pages, and each has its own page, which starts with the last 8 tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_rl.generate.engine.interface import GenerationRequest, PromptScores
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.transcript import Transcript
from megatron_rl.recipe.inference import InferenceConfig, Sampling

SCORED_AT_ONCE = 512
"""Prompt tokens that are scored together. Each needs one number per token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens of one sequence to compute, and the rows that start with them. No rows if more of its tokens follow."""

    tokens: list[int]
    start: int
    """Position of the first of `tokens`; earlier ones are in the cache."""
    pages: list[int]
    """Full pages of the sequence, from its first position."""
    samples: list[int]
    own: list[int]
    """Page in which each of these rows continues, with a copy of the tokens behind the last full page."""
    answer_tokens: list[int]
    answer_logprobs: list[float]
    key: int
    sampling: Sampling
    top_logprobs: int = 0
    scored: list[int] = field(default_factory=list)
    """Prompt tokens to score: the ones that follow the first tokens of this piece."""
    most_scored: int = 0
    grammar: str = ""


@dataclass(slots=True, eq=False)
class PendingRequest:
    request: GenerationRequest
    streamed: bool
    finished: dict[int, Transcript] = field(default_factory=dict)
    scores: PromptScores = field(default_factory=lambda: PromptScores([], [], []))

    @property
    def scored(self) -> bool:
        request = self.request
        return request.prompt_logprobs is None or len(self.scores.logprobs) == len(request.prompt_tokens) - 1

    def take_scores(self, start: int, new: PromptScores) -> None:
        known = self.scores
        self.scores = PromptScores(
            known.logprobs[:start] + new.logprobs,
            known.ranks[:start] + new.ranks,
            known.top_logprobs[:start] + new.top_logprobs,
        )


@dataclass(slots=True)
class WaitingSamples:
    """Waiting samples of a request that start with the same tokens. New samples share the prompt; a resumed sample
    waits alone, with the prompt and its tokens."""

    pending: PendingRequest
    samples: list[Transcript]
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.pending.request.prompt_tokens + self.samples[0].tokens


@dataclass(slots=True, eq=False)
class DecodedRow:
    pending: PendingRequest
    answer: Transcript
    pages: list[int]
    most_pages: int
    age: int
    cached: int
    current: bool = True
    """Whether the present weights computed everything in its pages."""
    ended: bool = False

    @property
    def followed(self) -> bool:
        return self.pending.streamed or self.answer.followed

    @property
    def grows(self) -> bool:
        return len(self.pages) < self.most_pages


class Admission:
    """Queue of waiting samples. Only the first branch holds pages."""

    def __init__(self, config: InferenceConfig, pages: Pages, *, whole: bool) -> None:
        """whole: compute each sequence in one piece from its first token on, also for a prompt's further samples. A
        prefill is then large enough, and pages are not reusable."""
        self._pages, self._whole = pages, whole
        self._max_batch = config.max_batch
        self._most_tokens = max(config.prefill_tokens, pages.tokens)
        self._most_scored = self._most_tokens if whole else max(min(SCORED_AT_ONCE, self._most_tokens), pages.tokens)
        self._waiting: deque[WaitingSamples] = deque()
        self._begun = 0  # number of rows that have started
        self.scoring: tuple[PendingRequest, int] | None = None
        """Request whose prompt the newest prefills score, and the position at which they start."""
        self.prefilled_tokens = 0

    @property
    def samples(self) -> int:
        return sum(len(branch.samples) for branch in self._waiting)

    @property
    def interrupted(self) -> list[Transcript]:
        return [answer for branch in self._waiting for answer in branch.samples if answer.tokens]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, branch: WaitingSamples) -> None:
        self._waiting.append(branch)

    def put_back(self, row: DecodedRow) -> None:
        """Put a row's sample at the front. It is the youngest row, but older than every waiting sample."""
        self.release_pages()
        self._waiting.appendleft(WaitingSamples(row.pending, [row.answer]))

    def cancel(self, pending: PendingRequest) -> None:
        if self._waiting and self._waiting[0].pending is pending:
            self.release_pages()
        self._waiting = deque(branch for branch in self._waiting if branch.pending is not pending)

    def release_pages(self) -> None:
        if self._waiting:
            self._pages.release(self._waiting[0].pages)
            self._waiting[0].pages = []

    def begin(self, running: Collection[DecodedRow]) -> tuple[list[Prefill], list[DecodedRow]]:
        """Return the next prefills, and the rows that start with them, in the same order. Either may be empty. Only
        one prompt is scored at a time."""
        prefills: list[Prefill] = []
        begun: list[DecodedRow] = []
        self.scoring = None
        if not self._waiting:  # the usual case of a decoding step
            return prefills, begun
        left = self._most_tokens
        growing = sum(row.grows for row in running)
        while self._waiting and left and len(running) + len(begun) < self._max_batch:
            branch, pending = self._waiting[0], self._waiting[0].pending
            scores = not pending.scored
            if not branch.pages and not scores:  # cached pages have no logits to score by
                # The last token is always computed, since sampling needs its logits.
                branch.pages = self._pages.find(branch.tokens[:-1])
            tokens = len(branch.tokens) - len(branch.pages) * self._pages.tokens
            most = min(left, self._most_scored) if scores else left
            if tokens <= most:
                prefill = self._rows(branch, len(running), begun, growing)
            elif left == self._most_tokens:
                prefill = self._piece(branch, most // self._pages.tokens, growing)
            else:
                break
            if prefill is None:
                break
            if scores:
                self.scoring = pending, prefill.start
            growing += sum(row.grows for row in begun[len(begun) - len(prefill.samples) :])
            prefills.append(prefill)
            left -= len(prefill.tokens)
            self.prefilled_tokens += len(prefill.tokens)
            if scores:
                break
        return prefills, begun

    def _piece(self, branch: WaitingSamples, count: int, growing: int) -> Prefill | None:
        """Return a prefill of the next `count` pages of a sequence too long for one; None if they do not fit.

        growing: rows that may need another page.
        """
        if count > self._pages.available - growing:
            return None
        prefill = self._prefill(branch, len(branch.pages) + count, [])
        branch.pages = prefill.pages
        return prefill

    def _rows(self, branch: WaitingSamples, running: int, begun: list[DecodedRow], growing: int) -> Prefill | None:
        """Return a prefill of a sequence's last tokens, and append rows for the samples that fit to `begun`;
        None if none fits.

        running: rows that are being decoded. growing: rows, running or begun, that may need another page.
        """
        request, tokens = branch.pending.request, branch.tokens
        full = len(tokens) // self._pages.tokens
        most_pages = self._pages.needed(len(request.prompt_tokens) + request.sampling.max_new_tokens)
        # Each row that may need another page has one reserved, so that new rows are not evicted soon after. Example:
        # 10 pages are left, 3 rows grow, and a new prompt needs 2 full pages. Of the 5 pages that remain, a row whose
        # answer fits into its own page takes one, so 5 samples start; one that may grow takes its page and reserves
        # another, so 2 start, and the other samples wait with the prompt's pages in the cache. With many rows this is
        # far less than all their answers may need: then the youngest gives way (`Scheduler.row_to_evict`).
        left = self._pages.available - (full - len(branch.pages)) - growing
        fit = left // (2 if most_pages > full + 1 else 1)
        if not running and not begun:  # a request on its own always fits: RequestLimits has checked it
            fit = max(fit, 1)
        count = min(fit, len(branch.samples), self._max_batch - running - len(begun))
        if count < 1:
            return None
        samples, others = branch.samples[:count], branch.samples[count:]
        prefill = self._prefill(branch, full, samples)
        for answer, own in zip(samples, prefill.own, strict=True):
            begun.append(
                DecodedRow(branch.pending, answer, [*prefill.pages, own], most_pages, self._begun, len(tokens))
            )
            self._begun += 1
        for _ in samples[1:]:
            self._pages.hold(prefill.pages)
        if others:
            kept = 0 if self._whole else (len(tokens) - 1) // self._pages.tokens
            branch.samples, branch.pages = others, prefill.pages[:kept]
            self._pages.hold(branch.pages)
        else:
            self._waiting.popleft()
        return prefill

    def _prefill(self, branch: WaitingSamples, full: int, samples: list[Transcript]) -> Prefill:
        """Return a prefill up to the end of `full` pages, or, with samples, to the end of the sequence."""
        request, tokens, held = branch.pending.request, branch.tokens, branch.pages
        start = len(held) * self._pages.tokens
        pages = held + self._pages.take(full - len(held))
        self._pages.name(tokens, pages)
        known = samples[0] if samples else None
        stop = len(tokens) if samples else full * self._pages.tokens
        return Prefill(
            tokens=tokens[start:stop],
            start=start,
            pages=pages,
            samples=[answer.sample for answer in samples],
            own=self._pages.take(len(samples)),
            answer_tokens=[*known.tokens] if known else [],
            answer_logprobs=[*known.logprobs] if known else [],
            key=request.key,
            sampling=request.sampling,
            top_logprobs=request.top_logprobs,
            scored=[] if branch.pending.scored else request.prompt_tokens[start + 1 : stop + 1],
            most_scored=request.prompt_logprobs or 0,
            grammar=request.grammar,
        )
