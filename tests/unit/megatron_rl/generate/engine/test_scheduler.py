"""Requests wait for rows, which takes no tensors: known tokens separately, and complete answers not at all."""

from __future__ import annotations

import subprocess
import sys

from megatron_rl.generate.engine.interface import AnswerPrefix, GenerationRequest
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.scheduler import Scheduler
from megatron_rl.recipe.inference import InferenceConfig, Sampling

END = 0


def test_known_tokens_wait_separately_and_complete_answers_not_at_all() -> None:
    scheduler = Scheduler(InferenceConfig(max_batch=8), Pages(64, 16), {END})
    known = {0: AnswerPrefix([1, END], [-1.0, -1.0], [4, 4]), 2: AnswerPrefix([1, 2], [-2.0, -2.0], [3, 4])}
    scheduler.submit(GenerationRequest([9, 9], 3, Sampling(max_new_tokens=4), 1, known=known))
    scheduler.publish(5, [])
    plan = scheduler.admit()
    assert plan is not None
    assert [(each.samples, each.answer_tokens) for each in plan.prefills] == [([1], []), ([2], [1, 2])]
    assert [each.tokens for each in plan.prefills] == [[9, 9], [9, 9, 1, 2]]
    assert len(scheduler.rows) == 2


def test_scheduler_imports_no_torch() -> None:
    program = (
        "import sys, megatron_rl.generate.engine.scheduler; "
        "print(sorted({'torch', 'numpy', 'asyncio'} & {*sys.modules}))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
