"""Programs of a model are run against the tests of its problem."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from optional import needs
from words import Words

from megatron_rl.environments.code.environment import CodeConfig, CodeEnvironment, ProgramLost
from megatron_rl.inference.api import FinishReason

pytestmark = needs("datasets")


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeEnvironment]:
    arguments = {**CodeEnvironment.sample_arguments(), "format_reward": -0.5, "negative_reward": -1.0}
    yield CodeEnvironment(CodeConfig.model_validate({**arguments, "test_timeout_s": 1}), Words())


def rewards(environment: CodeEnvironment, problem: int, *answers: str, finish: FinishReason = "stop") -> list[float]:
    golden = environment.training_problems()[problem].golden

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(environment.get_reward(answer, golden, finish) for answer in answers))

    return asyncio.run(all_of_them())


def test_the_solutions_of_the_samples_are_right_and_other_answers_are_not(environment: CodeEnvironment) -> None:
    for number, problem in enumerate(environment.training_problems()):
        gold, wrong = environment.gold_response(problem), environment.wrong_response(problem)
        assert rewards(environment, number, gold, wrong) == [1.0, -0.5]
    assert len(environment.training_problems()) == 4


def test_a_program_that_fails_hangs_or_attacks_is_wrong_and_prose_is_no_program(environment: CodeEnvironment) -> None:
    answers = [
        "while True: pass",
        "import os\nos.fork()",
        "x = [0] * 10**12",
        "raise SystemExit(3)",
        "print('9' * 10**9)",
    ]
    blocks = [f"```python\n{answer}\n```" for answer in answers]
    assert rewards(environment, 0, *blocks, "It is 7.") == [-0.5] * 5 + [-1.0]


def test_an_answer_that_was_cut_off_earns_nothing(environment: CodeEnvironment) -> None:
    gold = environment.gold_response(environment.training_problems()[0])
    assert rewards(environment, 0, gold, finish="length") == [-0.5]


def test_a_program_killed_by_somebody_else_is_lost_and_not_wrong(environment: CodeEnvironment) -> None:
    async def kill() -> float:
        golden = environment.training_problems()[0].golden
        waits = asyncio.ensure_future(environment.get_reward("```\nimport time; time.sleep(60)\n```", golden, "stop"))
        while not environment._programs._running:
            await asyncio.sleep(0.01)
        for process in list(environment._programs._running):
            process.kill()
        return await waits

    with pytest.raises(ProgramLost, match="killed"):
        asyncio.run(kill())
