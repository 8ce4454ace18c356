"""Programs written by a model run against the tests of their problem."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from optional import needs
from words import Words

from megatron_rl.agent.environments.code.code_environment import CodeEnvironment, CodeEnvironmentConfig
from megatron_rl.agent.scoring import NotJudged
from megatron_rl.generate.engine.interface import FinishReason

pytestmark = needs("datasets")


@pytest.fixture(scope="module")
def environment() -> Iterator[CodeEnvironment]:
    arguments = {**CodeEnvironment.sample_arguments(), "format_reward": -0.5, "negative_reward": -1.0}
    yield CodeEnvironment(CodeEnvironmentConfig.model_validate({**arguments, "test_timeout_s": 1}), Words())


def rewards(environment: CodeEnvironment, problem: int, *answers: str, finish: FinishReason = "stop") -> list[float]:
    golden = environment.training_problems()[problem].golden

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(environment.get_reward(answer, golden, finish) for answer in answers))

    return asyncio.run(all_of_them())


def test_solutions_of_the_samples_are_right_and_other_answers_wrong(environment: CodeEnvironment) -> None:
    for number, problem in enumerate(environment.training_problems()):
        gold, wrong = environment.gold_response(problem), environment.wrong_response(problem)
        assert rewards(environment, number, gold, wrong) == [1.0, -0.5]
    assert len(environment.training_problems()) == 4


def test_failing_hanging_or_hostile_program_is_wrong_and_prose_is_not_a_program(environment: CodeEnvironment) -> None:
    answers = [
        "while True: pass",
        "import os\nos.fork()",
        "x = [0] * 10**12",
        "raise SystemExit(3)",
        "print('9' * 10**9)",
    ]
    blocks = [f"```python\n{answer}\n```" for answer in answers]
    assert rewards(environment, 0, *blocks, "It is 7.") == [-0.5] * 5 + [-1.0]


def test_cut_off_answer_earns_nothing(environment: CodeEnvironment) -> None:
    gold = environment.gold_response(environment.training_problems()[0])
    assert rewards(environment, 0, gold, finish="length") == [-0.5]


def test_program_killed_from_outside_is_lost_and_not_wrong(environment: CodeEnvironment) -> None:
    async def kill() -> float:
        golden = environment.training_problems()[0].golden
        waits = asyncio.ensure_future(environment.get_reward("```\nimport time; time.sleep(60)\n```", golden, "stop"))
        while not environment._programs._running:
            await asyncio.sleep(0.01)
        for process in list(environment._programs._running):
            process.kill()
        return await waits

    with pytest.raises(NotJudged, match="killed"):
        asyncio.run(kill())


FUNCTIONS = {
    "cache": "@cache\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
    "lru_cache": "@lru_cache(maxsize=None)\ndef f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)",
    "a heap": "def f(n):\n    heap = []\n    heappush(heap, 55)\n    return heappop(heap)",
    "bisect": "def f(n):\n    return bisect_left(range(100), 55)",
    "numbers": "def f(n):\n    return gcd(110, 165) if inf > 1 and pow(3, 4, 5) == 1 else 0",
    "itertools": "def f(n):\n    return [*accumulate(range(n + 1))][-1]",
    "functools": "def f(n):\n    return reduce(operator.add, range(n + 1))",
    "text": "def f(n):\n    return int(re.sub('x', '5', 'xx')) if string.digits else 0",
    "collections": "class Solution:\n    def f(self, n: int) -> Optional[int]:\n        return Counter({1: 55})[1]",
    "rare modules": "def f(n):\n    return copy.copy([55])[0] if random.random() < 1 and datetime.date.today() else 0",
    "recursion": "def f(n):\n    def g(k):\n        return 0 if k == 0 else 1 + g(k - 1)\n    return g(5000) - 4945",
    "recursion through C": "@cache\ndef g(k):\n    return k and 1 + g(k - 1)\ndef f(n):\n    return g(5000) - 4945",
}


def graded(source: str, tests: dict[str, object]) -> float:
    """Reward of a program; the environment is only as large as the test needs."""
    config = CodeEnvironmentConfig.model_validate({**CodeEnvironment.sample_arguments(), "processes": 1})
    environment = CodeEnvironment(config, Words())
    return asyncio.run(environment.get_reward(f"```python\n{source}\n```", {"answer": json.dumps(tests)}, "stop"))


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_function_may_use_the_usual_imports(kind: str) -> None:
    assert graded(FUNCTIONS[kind], {"fn_name": "f", "inputs": [[10]], "outputs": [55]}) == 1.0


def test_function_of_the_prelude_is_not_an_answer() -> None:
    tests = {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}
    assert graded("# math has it", tests) == 0.0
    assert graded("class Solution:\n    def gcd(self, a, b):\n        return 2", tests) == 1.0


def test_returned_text_is_compared_as_text() -> None:
    tests = {"fn_name": "f", "inputs": [[1]], "outputs": ["12"]}
    assert graded("def f(n):\n    return '12'", tests) == 1.0
    assert graded("def f(n):\n    return 12", tests) == 0.0


def test_program_may_recurse_five_thousand_calls_deep() -> None:
    source = "def g(k):\n    return 0 if k == 0 else 1 + g(k - 1)\nprint(g(int(input())))"
    assert graded(source, {"inputs": ["5000\n"], "outputs": ["5000\n"]}) == 1.0
