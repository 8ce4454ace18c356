"""Replaces a model runner: its cache records who wrote what, and answers follow from the request's key."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.engine.scheduler import Scheduler, StepPlan
from megatron_rl.generate.engine.transcript import Amount, RowAnswer

END = 0


def scripted(key: int, sample: int, place: int) -> int:
    """Return the token at this position of an answer; about one in eight is the end token."""
    mixed = (key * 7919 + sample * 104729 + place * 1299709 + 12345) * 2654435761 % 2**32
    return END if mixed >> 29 == 0 else 1 + (mixed >> 8) % 50


def scripted_answer(request: GenerationRequest, sample: int) -> list[int]:
    """Return all tokens that a sample of a request must get."""
    tokens: list[int] = []
    while len(tokens) < request.sampling.max_new_tokens and END not in tokens:
        tokens.append(scripted(request.key, sample, len(tokens)))
    return tokens


@dataclass(slots=True)
class _Row:
    key: int
    sample: int
    limit: int
    pages: list[int]
    cached: list[int]
    """Tokens whose keys and values are in the pages."""
    answer: list[int]
    ended: bool = False


@dataclass
class ScriptedRunner:
    """Executes plans and checks their effect on the cache."""

    page_tokens: int
    looks_every: int = 1
    """Number of steps between two checks for ended rows."""
    checks: bool = True
    rows: dict[int, _Row] = field(default_factory=dict)
    cache: dict[tuple[int, int], int] = field(default_factory=dict)
    """(page, slot in it) -> token"""
    computed: int = 0
    _steps: int = 0

    def execute(self, plan: StepPlan) -> list[int] | None:
        plan = pickle.loads(pickle.dumps(plan))  # a copy, as another rank would get it
        for source, target in plan.moves:
            self.rows[target] = self.rows.pop(source)
        for row, place, page in plan.pages:
            pages = self.rows[row].pages
            assert place == len(pages)
            pages.append(page)
        if plan.prefills:
            self._prefill(plan)
        else:
            self._decode(plan)
        if not plan.rows:
            return None
        for place in plan.rows:
            row = self.rows[place]
            if not row.ended:
                row.answer.append(scripted(row.key, row.sample, len(row.answer)))
                row.ended = row.answer[-1] == END or len(row.answer) == row.limit
        self._steps += 1
        if self._steps % self.looks_every:
            return None
        return [place for place in range(plan.rows.stop) if self.rows[place].ended]

    def answers(self, known: Mapping[int, Amount]) -> list[RowAnswer]:
        found = []
        for place, held in known.items():
            tokens = self.rows[place].answer[held.tokens :]
            found.append(RowAnswer(place, tokens, [-float(self.rows[place].sample)] * len(tokens)))
        return found

    def _prefill(self, plan: StepPlan) -> None:
        free = iter(plan.rows)
        for prefill in plan.prefills:
            assert prefill.tokens
            self.computed += len(prefill.tokens)
            stop = prefill.start + len(prefill.tokens)
            for pages in [[*prefill.pages, page] for page in prefill.own] or [prefill.pages]:
                for place, token in enumerate(prefill.tokens, prefill.start):
                    self.cache[pages[place // self.page_tokens], place % self.page_tokens] = token
                cached = [self.cache[pages[i // self.page_tokens], i % self.page_tokens] for i in range(stop)]
                if prefill.own:
                    at, sample = next(free), prefill.samples[prefill.own.index(pages[-1])]
                    limit = prefill.sampling.max_new_tokens
                    self.rows[at] = _Row(prefill.key, sample, limit, pages, cached, [*prefill.answer_tokens])
        assert next(free, None) is None

    def _decode(self, plan: StepPlan) -> None:
        assert plan.rows == range(len(plan.rows))
        live = [self.rows[place] for place in plan.rows]
        for row in live:
            assert self.looks_every > 1 or not row.ended, "a row that is known to have ended is computed"
            if row.ended:
                continue
            place = len(row.cached)
            page = row.pages[place // self.page_tokens]
            if self.checks:
                assert sum(page in each.pages for each in live) == 1, "a shared page is written"
            self.cache[page, place % self.page_tokens] = row.answer[-1]
            row.cached.append(row.answer[-1])
        if self.checks:
            for row in live:
                held = [
                    self.cache[row.pages[i // self.page_tokens], i % self.page_tokens] for i in range(len(row.cached))
                ]
                assert held == row.cached, "a page was written that a row still needs"


def step(scheduler: Scheduler, runner: ScriptedRunner) -> None:
    """Run the scheduler as the engine does."""
    while (place := scheduler.row_to_evict()) is not None:
        scheduler.evict(place, runner.answers(scheduler.wanted([place])))
    for plan_next in (scheduler.decode, scheduler.admit):
        if plan := plan_next():
            ended = runner.execute(plan)
            if ended is not None and (wanted := scheduler.wanted(ended)):
                scheduler.retire(runner.answers(wanted))
