"""A cache too small for all requests: the youngest row is evicted and resumes unchanged, and no page is lost."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import END, ScriptedRunner, scripted_answer, step

from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.scheduler import Scheduler
from megatron_rl.generate.engine.transcript import RowAnswer
from megatron_rl.recipe.inference import InferenceConfig, Sampling

PAGE = 4


def engine(pages: int, looks_every: int = 1, shares: bool = True, **config: int) -> tuple[Scheduler, ScriptedRunner]:
    held = Pages(pages, PAGE, reusable=shares)
    return Scheduler(InferenceConfig(**config), held, {END}), ScriptedRunner(PAGE, looks_every)


def request(key: int, prompt: Sequence[int], samples: int, limit: int) -> GenerationRequest:
    return GenerationRequest([*prompt], samples, Sampling(max_new_tokens=limit), key)


def lasting(least: int, prompt: Sequence[int], limit: int, samples: int = 1) -> GenerationRequest:
    """A request whose first answer has at least this many tokens."""
    asked = (request(key, prompt, samples, limit) for key in range(1000))
    return next(each for each in asked if len(scripted_answer(each, 0)) >= least)


def answered(scheduler: Scheduler, asked: GenerationRequest) -> None:
    completions = scheduler.answered.pop(asked.id)
    assert [each.tokens for each in completions] == [scripted_answer(asked, i) for i in range(asked.num_samples)]
    for sample, each in enumerate(completions):
        assert each.logprobs == [-float(sample)] * len(each.tokens)
        assert each.versions == [0] * len(each.tokens)


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=14)


@examples(30)
@given(
    asked=st.lists(st.tuples(PROMPTS, st.integers(1, 5), st.integers(1, 20)), min_size=1, max_size=8),
    spare=st.integers(0, 12),
    max_batch=st.integers(1, 7),
    prefill_tokens=st.integers(1, 20),
    looks_every=st.sampled_from([1, 3]),
    shares=st.booleans(),
    cancelled=st.dictionaries(st.integers(0, 30), st.integers(0, 7), max_size=3),
)
def test_every_answer_is_that_of_its_key_and_every_page_comes_back(
    asked: list[tuple[list[int], int, int]],
    spare: int,
    max_batch: int,
    prefill_tokens: int,
    looks_every: int,
    shares: bool,
    cancelled: dict[int, int],
) -> None:
    """The runner checks that no shared page is written and that no needed page is lost."""
    pages = max(-(-(len(prompt) + limit) // PAGE) for prompt, _, limit in asked) + spare
    scheduler, runner = engine(pages, looks_every, shares, max_batch=max_batch, prefill_tokens=prefill_tokens)
    requests = [request(key, *each) for key, each in enumerate(asked)]
    for each in requests:
        scheduler.submit(each)
    gone, steps = set(), 0
    while scheduler.busy:
        if (number := cancelled.get(steps, len(requests))) < len(requests):
            scheduler.cancel(requests[number].id)
            gone.add(number)
        step(scheduler, runner)
        assert scheduler.load.free_pages >= 0
        steps += 1
        assert steps < 5000
    for number, each in enumerate(requests):
        if number not in gone:
            answered(scheduler, each)
    assert scheduler.load.free_pages == pages
    assert not scheduler.answered


def test_oldest_row_is_never_evicted_so_none_starves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache holds a little more than one sequence of full length."""
    scheduler, runner = engine(pages=12, max_batch=8)
    long = [each for each in (request(key, [1], 1, 40) for key in range(200)) if len(scripted_answer(each, 0)) > 15]
    for each in long[:8]:
        scheduler.submit(each)
    gave_way: list[str] = []
    evict = scheduler.evict

    def noted(place: int, answers: Iterable[RowAnswer]) -> None:
        gave_way.append(scheduler.rows[place].pending.request.id)
        evict(place, answers)

    monkeypatch.setattr(scheduler, "evict", noted)
    while scheduler.busy:
        oldest = next(each.id for each in long if each.id not in scheduler.answered)
        before = len(gave_way)
        step(scheduler, runner)
        assert oldest not in gave_way[before:]
    assert gave_way, "the cache was too large to evict anything"
    for each in long[:8]:
        answered(scheduler, each)


def test_group_stores_and_computes_its_prompt_once() -> None:
    scheduler, runner = engine(pages=40, max_batch=16)
    asked = request(3, [1] * (3 * PAGE + 2), 8, 2)
    scheduler.submit(asked)
    step(scheduler, runner)
    assert scheduler.load.running == 8
    assert scheduler.load.free_pages == 40 - 3 - 8
    assert scheduler.prefilled_tokens == runner.computed == len(asked.prompt_tokens)


def test_samples_without_a_row_do_not_recompute_the_full_pages_of_their_prompt() -> None:
    for shares in (True, False):
        scheduler, runner = engine(pages=40, max_batch=2, shares=shares)
        asked = request(3, [1] * (3 * PAGE + 2), 4, 1)
        scheduler.submit(asked)
        while scheduler.busy:
            step(scheduler, runner)
        assert scheduler.prefilled_tokens == len(asked.prompt_tokens) + 2


def test_conversation_continues_from_the_cache_of_its_last_turn() -> None:
    """Except for pages that are not full, the newest token, and everything that replaced weights computed."""
    scheduler, runner = engine(pages=40, max_batch=2)
    first = lasting(6, [1, 2, 3, 1, 2, 3], 9)
    history = first.prompt_tokens + scripted_answer(first, 0)
    second = request(2000, [*history, 7, 7], 1, 2)

    def prefilled_by(asked: GenerationRequest) -> int:
        before = scheduler.prefilled_tokens
        scheduler.submit(asked)
        while scheduler.busy:
            step(scheduler, runner)
        answered(scheduler, asked)
        return scheduler.prefilled_tokens - before

    assert prefilled_by(first) == 6
    found = (len(history) - 1) // PAGE * PAGE
    assert found >= 2 * PAGE
    assert prefilled_by(second) == len(history) + 2 - found
    scheduler.publish(1, ())
    again = request(2001, second.prompt_tokens, 1, 2)
    before = scheduler.prefilled_tokens
    scheduler.submit(again)
    step(scheduler, runner)
    assert scheduler.prefilled_tokens - before == len(again.prompt_tokens)


def test_long_prompt_is_computed_in_pieces_with_decoding_in_between() -> None:
    scheduler, runner = engine(pages=60, max_batch=4, prefill_tokens=2 * PAGE)
    short = lasting(6, [1], 30)
    scheduler.submit(short)
    step(scheduler, runner)
    scheduler.submit(request(2000, [2] * (7 * PAGE), 2, 4))
    lengths, computed = [], []
    while scheduler.load.waiting:
        before = runner.computed
        step(scheduler, runner)
        computed.append(runner.computed - before)
        lengths.append(sum(len(each.answer) for each in runner.rows.values() if each.key == short.key))
    assert computed == [2 * PAGE] * 3 + [PAGE]
    assert lengths == [2, 3, 4, 5]


def soak(requests: int) -> int:
    """Return the bytes of the scheduler and everything it refers to, after this many requests under pressure."""
    scheduler, runner = engine(pages=14, max_batch=6, prefill_tokens=3 * PAGE)
    runner.checks = False
    asked = 0
    while asked < requests or scheduler.busy:
        while asked < requests and scheduler.load.waiting < 6:
            prompt = [1 + asked % 7] * (1 + asked % 11)
            each = request(asked, prompt, 1 + asked % 3, 2 + asked % 30)
            scheduler.submit(each)
            asked += 1
            if asked % 50 == 0:
                scheduler.cancel(each.id)
        step(scheduler, runner)
        scheduler.answered.clear()
    return size_of(scheduler)


def size_of(root: object) -> int:
    """Yield all reachable objects except classes and modules."""
    gc.collect()
    seen: dict[int, object] = {}
    left = [root]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, type(sys)) and not isinstance(each, type):
            seen[id(each)] = each
            left += gc.get_referents(each)
    return sum(map(sys.getsizeof, seen.values()))


@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_number_of_requests(count: int) -> None:
    assert soak(count) < 1.2 * soak(300)
