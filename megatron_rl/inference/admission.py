"""Which samples wait, and which of them begin: as many as there are rows and pages for, in the order they came in.

A prompt longer than a prefill is computed in pieces, between which the rows go on. The samples of a prompt share its
full pages, and find those of others that begin alike. What is left of it each has in a page of its own, which
all are written in the same pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_rl.inference.api import GenerationRequest, PromptScores
from megatron_rl.inference.config import AdjustedSampling, InferenceConfig, Sampling
from megatron_rl.inference.pages import Pages
from megatron_rl.inference.plans import Prefill
from megatron_rl.inference.transcript import Transcript

SCORED_AT_ONCE = 512
"""Tokens of a prompt that are scored at once: each takes as many numbers as the vocabulary has tokens."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request that is not answered yet."""

    request: GenerationRequest
    streamed: bool
    finished: dict[int, Transcript] = field(default_factory=dict)
    scores: PromptScores = field(default_factory=lambda: PromptScores([], [], []))
    """Scores of its prompt as far as it was computed, if they were asked for."""

    @property
    def scored(self) -> bool:
        """Whether nothing of its prompt is still to be scored."""
        request = self.request
        return request.prompt_logprobs is None or len(self.scores.logprobs) == len(request.prompt_tokens) - 1

    def take_scores(self, start: int, new: PromptScores) -> None:
        """Add the scores of a piece of the prompt that begins at place `start`."""
        known = self.scores
        self.scores = PromptScores(
            known.logprobs[:start] + new.logprobs,
            known.ranks[:start] + new.ranks,
            known.top_logprobs[:start] + new.top_logprobs,
        )


@dataclass(slots=True)
class Branch:
    """Samples of a request that wait and begin with the same tokens: new ones with the prompt, one that is gone on with
    also with its own."""

    pending: PendingRequest
    samples: list[Transcript]
    pages: list[int] = field(default_factory=list)
    """Full ones with what it begins with, as far as that is in the cache."""

    @property
    def tokens(self) -> list[int]:
        return self.pending.request.prompt_tokens + self.samples[0].tokens


@dataclass(slots=True, eq=False)
class Row:
    """What is decoded in one row."""

    pending: PendingRequest
    answer: Transcript
    """As far as the host has seen it."""
    pages: list[int]
    most_pages: int
    """That it can need."""
    age: int
    """Rows that had begun before."""
    cached: int
    """Tokens of it that were in the cache when it began."""
    current: bool = True
    """Whether all that its pages hold was computed by the present weights."""
    ended: bool = False

    @property
    def followed(self) -> bool:
        return self.pending.streamed or self.answer.followed

    @property
    def grows(self) -> bool:
        """Whether it can need another page."""
        return len(self.pages) < self.most_pages


class Admission:
    """The samples that wait. Only the first ones have pages."""

    def __init__(self, config: InferenceConfig, pages: Pages) -> None:
        self._pages = pages
        self._max_batch = config.max_batch
        self._at_once = max(config.prefill_tokens, pages.tokens)
        self._scored_at_once = max(min(SCORED_AT_ONCE, self._at_once), pages.tokens)
        self._waiting: deque[Branch] = deque()
        self._begun = 0
        self.scoring: tuple[PendingRequest, int] | None = None
        """Request whose prompt the newest prefills score, and the place from which on they do."""
        self.prefilled_tokens = 0
        """Tokens of prompts, and of answers that were gone on with, that were computed so far."""

    @property
    def samples(self) -> int:
        """How many wait."""
        return sum(len(branch.samples) for branch in self._waiting)

    @property
    def interrupted(self) -> list[Transcript]:
        """Those of them that have tokens."""
        return [answer for branch in self._waiting for answer in branch.samples if answer.tokens]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def append(self, branch: Branch) -> None:
        """It came last."""
        self._waiting.append(branch)

    def put_back(self, row: Row) -> None:
        """A row that gave way, the youngest: whatever waits came later."""
        self.give_pages_back()
        self._waiting.appendleft(Branch(row.pending, [row.answer]))

    def cancel(self, pending: PendingRequest) -> None:
        """Those of a request wait no more."""
        if self._waiting and self._waiting[0].pending is pending:
            self.give_pages_back()
        self._waiting = deque(branch for branch in self._waiting if branch.pending is not pending)

    def give_pages_back(self) -> None:
        """Compute anew what a prompt begins with, as far as it is not found again."""
        if self._waiting:
            self._pages.release(self._waiting[0].pages)
            self._waiting[0].pages = []

    def begin(self, running: Collection[Row]) -> tuple[list[Prefill], list[Row]]:
        """What to compute next, and the rows that begin with it, in their order. Both may be nothing. One prompt is
        scored at a time."""
        prefills: list[Prefill] = []
        begun: list[Row] = []
        self.scoring = None
        if not self._waiting or len(running) == self._max_batch:
            return prefills, begun
        left = self._at_once
        growing = sum(row.grows for row in running)
        while self._waiting and left and len(running) + len(begun) < self._max_batch:
            branch, pending = self._waiting[0], self._waiting[0].pending
            scores = not pending.scored
            if not branch.pages and not scores:  # what is found has no logits
                branch.pages = self._pages.find(branch.tokens[:-1])  # who knows all tokens still needs a logit
            tokens = len(branch.tokens) - len(branch.pages) * self._pages.tokens
            most = min(left, self._scored_at_once) if scores else left
            if tokens <= most:
                made = self._rows(branch, len(running), begun, growing)
            elif left == self._at_once:
                made = self._piece(branch, most // self._pages.tokens, growing)
            else:
                break
            if made is None:
                break
            if scores:
                self.scoring = pending, made.start
            growing += sum(row.grows for row in begun[len(begun) - len(made.samples) :])
            prefills.append(made)
            left -= len(made.tokens)
            self.prefilled_tokens += len(made.tokens)
            if scores:
                break
        return prefills, begun

    def _piece(self, branch: Branch, count: int, growing: int) -> Prefill | None:
        """The next pages of a sequence that is too long for one prefill; None where there is no room for them.

        growing: rows that may need another page.
        """
        if count > self._pages.available - growing:
            return None
        made = self._prefill(branch, len(branch.pages) + count, [])
        branch.pages = made.pages
        return made

    def _rows(self, branch: Branch, running: int, begun: list[Row], growing: int) -> Prefill | None:
        """The last tokens of a sequence, and rows for as many of its samples as there is room for, which are added to
        those `begun`; None where there is room for none.

        running: rows beside those `begun`. growing: of both, those that may need another page.
        """
        request, tokens = branch.pending.request, branch.tokens
        full = len(tokens) // self._pages.tokens
        most_pages = self._pages.needed(len(request.prompt_tokens) + request.sampling.max_new_tokens)
        # A page is left free for each row that may need another one, lest new rows soon give way.
        left = self._pages.available - (full - len(branch.pages)) - growing
        fit = left // (2 if most_pages > full + 1 else 1)
        if not running and not begun:  # every request that was taken on has room alone
            fit = max(fit, 1)
        count = min(fit, len(branch.samples), self._max_batch - running - len(begun))
        if count < 1:
            return None
        samples, others = branch.samples[:count], branch.samples[count:]
        made = self._prefill(branch, full, samples)
        for answer, own in zip(samples, made.own, strict=True):
            begun.append(Row(branch.pending, answer, [*made.pages, own], most_pages, self._begun, len(tokens)))
            self._begun += 1
        for _ in samples[1:]:
            self._pages.hold(made.pages)
        if others:
            branch.samples, branch.pages = others, made.pages[: (len(tokens) - 1) // self._pages.tokens]
            self._pages.hold(branch.pages)
        else:
            self._waiting.popleft()
        return made

    def _prefill(self, branch: Branch, full: int, samples: list[Transcript]) -> Prefill:
        """Up to the end of so many pages, or with samples to that of the sequence."""
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
            penalized=request.prompt_tokens if _penalized(request.sampling) else [],
        )


def _penalized(sampling: Sampling) -> bool:
    return isinstance(sampling, AdjustedSampling) and sampling.repetition_penalty != 1
