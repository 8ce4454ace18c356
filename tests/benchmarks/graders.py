"""Count how many rows of the tables in tests/unit are judged as the tables say, by kind: mathematics, code, and where
an answer stands. Mathematics is judged by an evaluation's own scoring and by math-verify alone, on the same responses.

    python tests/benchmarks/graders.py [--wrong]

--wrong: print each row that mrl judges otherwise. Put another version of megatron_rl on `PYTHONPATH` to measure it.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

UNIT = Path(__file__).parents[1] / "unit" / "megatron_rl"
TABLES = UNIT / "agent" / "environments" / "tables"


class Judged(NamedTuple):
    kind: str
    row: str
    verdict: bool | None
    """None if there is none."""
    expected: bool
    alone: bool | None = None
    """Verdict of math-verify alone."""


class NoTokenizer:
    """Tokenizer of an environment that only scores."""

    def as_prompt(self, text: str) -> str:
        return text


def math_verify_alone(pair: list[str]) -> bool:
    """Return the verdict of math-verify as verl and NeMo-RL call it. Runs in a worker."""
    import logging

    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.WARNING)  # it warns that its own time limits are off; the worker has one
    golden, response = pair
    one = parse(f"\\boxed{{{golden}}}", [LatexExtractionConfig()], parsing_timeout=None)
    other = parse(response, [ExprExtractionConfig(), LatexExtractionConfig()], parsing_timeout=None)
    return bool(verify(one, other, timeout_seconds=None))


def table(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def responses() -> Iterator[tuple[str, str, str, bool]]:
    """(kind, right answer, response, expected verdict) of every mathematical row."""
    for path in sorted(TABLES.glob("math_pairs*.yaml")):
        for rows in table(path).values():
            for golden, answer, verdict, _ in rows:
                yield f"mathematics, {path.stem}", golden, f"\\boxed{{{answer}}}", verdict == "right"
    for golden, response, verdict, _ in table(TABLES / "math_responses.yaml"):
        yield "mathematics, math_responses", golden, response, verdict == "right"


async def mathematics(folder: Path) -> list[Judged]:
    from megatron_rl.agent.environments.math.environment import MathConfig, MathEnvironment
    from megatron_rl.agent.sandbox.limits import Ending, ProcessLimits
    from megatron_rl.agent.sandbox.process_pools import WorkerPool

    (folder / "one.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    config = MathConfig.model_validate({"train": {"path": str(folder / "one.jsonl")}, "chat": "never", "verifiers": 1})
    environment = MathEnvironment(config, NoTokenizer())  # type: ignore[arg-type]
    alone = WorkerPool("graders:math_verify_alone", 1, ProcessLimits(wall_s=120.0, cpu_s=10, memory_bytes=2**32))
    found = []
    for kind, golden, response, expected in responses():
        reward = await environment.get_reward(response, {"answer": golden}, "stop")
        outcome = await alone.ask([golden, response])
        other = bool(outcome.value) if outcome.ending is Ending.OK else None
        found.append(Judged(kind, f"{golden} | {response}", reward == 1.0, expected, other))
    alone.close()
    return found


def places() -> Iterator[Judged]:
    from megatron_rl.agent.answer_format import FORMATS

    found = table(UNIT / "agent" / "answers_found.yaml")
    for name in FORMATS:
        for response, answer, follows in found[name]:
            one = FORMATS[name].find(response)
            same = (one and (one.text, one.has_trailing_text)) == (answer and (answer, follows == "text"))
            yield Judged(f"where it stands, {name}", repr(response), same, True)
    for kind, has_trailing_text in (("harmless", False), ("harmful", True)):
        for ending in found[kind]:
            one = FORMATS["boxed"].find(rf"\boxed{{42}}{ending}")
            same = one is not None and (one.text, one.has_trailing_text) == ("42", has_trailing_text)
            yield Judged(f"endings, {kind}", repr(ending), same, True)


def programs() -> Iterator[Judged]:
    from megatron_rl.agent.environments.code.test_cases import parse_tests, passes

    code = table(TABLES / "code_answers.yaml")
    for expected, answer, verdict, _ in code["printed"]:
        found = passes(expected, answer, function=False)
        yield Judged("code, printed", f"{expected} | {answer}", found, verdict == "right")
    for expected, answer, verdict, _ in code["returned"]:
        [test] = parse_tests(json.dumps({"inputs": [[0]], "outputs": [expected], "fn_name": "f"})).cases
        found = passes(test.expected, answer, function=True)
        yield Judged("code, returned", f"{expected} | {answer}", found, verdict == "right")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mathematical = asyncio.run(mathematics(Path(folder)))
    rows = [*mathematical, *places(), *programs()]
    counts, as_expected = Counter(row.kind for row in rows), Counter[str]()
    for row in rows:
        as_expected[row.kind] += row.verdict == row.expected
        if row.verdict != row.expected and "--wrong" in sys.argv:
            print(f"  {row.kind}: {row.row}: {'right, but not taken' if row.expected else 'wrong, but taken'}")
    for kind, count in counts.items():
        alone = sum(row.alone == row.expected for row in mathematical if row.kind == kind)
        beside = f"; math-verify alone: {alone}" if kind.startswith("mathematics") else ""
        print(f"{kind}: {as_expected[kind]} of {count}{beside}")
    scores = Counter((bool(row.verdict), bool(row.alone), row.expected) for row in mathematical)
    ours, alone, missed = (sum(n for key, n in scores.items() if of(*key)) for of in (
        lambda mine, _, __: mine, lambda _, other, __: other, lambda mine, other, __: mine and not other))  # fmt: skip
    taken = sum(n for (mine, other, _), n in scores.items() if other and not mine)
    print(f"score of all {len(mathematical)} responses: mrl {ours}, math-verify alone {alone}: "
          f"+{missed} that it misses, -{taken} that it takes and mrl does not")  # fmt: skip


if __name__ == "__main__":
    main()
