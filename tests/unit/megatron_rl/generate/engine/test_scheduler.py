"""Requests on their way through the rows: every sample gets its tokens in one row, and no plan computes ended rows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.generate.engine.interface import AnswerPrefix, GenerationRequest, PartialAnswer
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.scheduler import Scheduler, StepPlan
from megatron_rl.generate.engine.transcript import RowAnswer
from megatron_rl.recipe.inference import InferenceConfig, Sampling

END = 0


@dataclass
class FakeRunner:
    """Samples the numbers 1, 2, ... for every row, and the end token last; the request's key determines how many."""

    rows: dict[int, tuple[int, int, list[int], list[float]]] = field(default_factory=dict)
    """row -> key, sample, tokens, log-probs"""
    limits: dict[int, int] = field(default_factory=dict)
    computed: int = 0

    def execute(self, plan: StepPlan) -> list[int]:
        plan = pickle.loads(pickle.dumps(plan))  # a copy, as another rank would get it
        for source, target in plan.moves:
            self.rows[target] = self.rows.pop(source)
        free = iter(plan.rows)
        for prefill in plan.prefills:
            for sample in prefill.samples:
                row = next(free)
                self.rows[row] = prefill.key, sample, [*prefill.answer_tokens], [*prefill.answer_logprobs]
                self.limits[prefill.key] = prefill.sampling.max_new_tokens
        assert next(free, None) is None or not plan.prefills
        if not plan.prefills:
            assert plan.rows == range(len(plan.rows))
        self.computed += len(plan.rows)
        ended = []
        for row in plan.rows:
            key, sample, tokens, logprobs = self.rows[row]
            length = self.limits[key] - (key + sample) % 2  # every other sample stops before its limit
            tokens.append(len(tokens) + 1 if len(tokens) + 1 < length or length == self.limits[key] else END)
            logprobs.append(-float(sample))
            if tokens[-1] == END or len(tokens) == self.limits[key]:
                ended.append(row)
        return ended

    def answers(self, known: Mapping[int, int]) -> list[RowAnswer]:
        return [RowAnswer(row, self.rows[row][2][first:], self.rows[row][3][first:]) for row, first in known.items()]


def step(scheduler: Scheduler, runner: FakeRunner) -> None:
    for plan_next in (scheduler.decode, scheduler.admit):
        if plan := plan_next():
            retire(scheduler, runner, plan)


def retire(scheduler: Scheduler, runner: FakeRunner, plan: StepPlan) -> None:
    scheduler.retire(runner.answers(scheduler.wanted(runner.execute(plan))))


def partial(scheduler: Scheduler, runner: FakeRunner) -> list[PartialAnswer]:
    return scheduler.partial_answers(runner.answers(scheduler.wanted(scheduler.rows)))


def request(key: int, samples: int, limit: int, known: dict[int, AnswerPrefix] | None = None) -> GenerationRequest:
    return GenerationRequest([9] * (key + 1), samples, Sampling(max_new_tokens=limit), key, known=known or {})


@examples(50)
@given(
    max_batch=st.integers(1, 7),
    prefill_tokens=st.integers(1, 12),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(2, 6)), min_size=1, max_size=6),
    cancelled=st.dictionaries(st.integers(0, 12), st.integers(0, 5), max_size=4),
)
def test_every_request_is_answered_unless_cancelled_and_no_row_is_left(
    max_batch: int, prefill_tokens: int, sizes: list[tuple[int, int]], cancelled: dict[int, int]
) -> None:
    """cancelled: step -> request that is cancelled before it."""
    scheduler = Scheduler(InferenceConfig(max_batch=max_batch, prefill_tokens=prefill_tokens), Pages(64, 16), {END})
    runner = FakeRunner()
    requests = [request(key, samples, limit) for key, (samples, limit) in enumerate(sizes)]
    for each in requests:
        scheduler.submit(each)
    steps, gone = 0, set()
    while scheduler.busy:
        if cancelled.get(steps, 99) < len(requests):
            gone.add(requests[cancelled[steps]].id)
            scheduler.cancel(requests[cancelled[steps]].id)
        assert len(scheduler.rows) <= max_batch
        assert {each.request_id for each in partial(scheduler, runner)}.isdisjoint(gone)
        step(scheduler, runner)
        steps += 1
    assert not scheduler.rows
    assert scheduler.partial_answers([]) == []
    for each in requests:
        if each.id in gone:
            assert each.id not in scheduler.answered
            continue
        completions = scheduler.answered[each.id]
        assert len(completions) == each.num_samples
        for sample, completion in enumerate(completions):
            assert completion.logprobs == [-float(sample)] * len(
                completion.tokens
            )  # from its own row, wherever that moved
            expected = "stop" if (each.key + sample) % 2 else "length"
            assert (completion.finish_reason, completion.tokens[-1] == END) == (expected, expected == "stop")
            assert completion.versions == [0] * len(completion.tokens)
    if not gone:
        assert runner.computed == sum(len(one.tokens) for each in requests for one in scheduler.answered[each.id])


def test_known_tokens_wait_separately_and_complete_answers_not_at_all() -> None:
    scheduler, runner = Scheduler(InferenceConfig(max_batch=8), Pages(64, 16), {END}), FakeRunner()
    known = {0: AnswerPrefix([1, END], [-1.0, -1.0], [4, 4]), 2: AnswerPrefix([1, 2], [-2.0, -2.0], [3, 4])}
    asked = request(1, 3, 4, known)
    scheduler.submit(asked)
    scheduler.publish(5, [])
    plan = scheduler.admit()
    assert plan is not None
    assert [(each.samples, each.answer_tokens) for each in plan.prefills] == [([1], []), ([2], [1, 2])]
    assert [each.tokens for each in plan.prefills] == [[9, 9], [9, 9, 1, 2]]
    retire(scheduler, runner, plan)
    while scheduler.busy:
        step(scheduler, runner)
    assert [completion.versions for completion in scheduler.answered[asked.id]] == [[4, 4], [5] * 4, [3, 4, 5]]


def test_scheduler_imports_no_torch() -> None:
    program = (
        "import sys, megatron_rl.generate.engine.scheduler; "
        "print(sorted({'torch', 'numpy', 'asyncio'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
