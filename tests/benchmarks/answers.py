"""Count how many pairs of the tables in tests/unit the graders judge right, by kind: mathematics, code, and extraction
of answers.

    python tests/benchmarks/answers.py [--wrong]

--wrong: print each pair that is judged wrong. Put another version of megatron_rl on `PYTHONPATH` to measure it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FAULTS = ("", "right, but not taken", "wrong, but taken", "no verdict")
UNIT = Path(__file__).parents[1] / "unit" / "megatron_rl"


def table(file: str) -> dict[str, list[Any]]:
    return yaml.safe_load((UNIT / file).read_text("utf-8"))


def judged() -> Iterator[tuple[str, str, bool | None, bool]]:
    """(kind, pair, verdict, expected verdict) of every row; the verdict is None after a time-out."""
    from megatron_rl.agent.answer_format import FORMATS
    from megatron_rl.environments.code.tests import parse_tests, passes
    from megatron_rl.environments.math.verifier import NoVerdict, Verifier

    verifier = Verifier(processes=1, timeout_s=20.0, memory_gib=4.0)

    def equal(golden: str, answer: str) -> bool | None:
        try:
            return asyncio.run(verifier.equal(golden, answer))
        except NoVerdict:
            return None

    for kind, rows in table("environments/tables/math_pairs.yaml").items():
        for golden, answer, verdict, _ in rows:
            yield f"mathematics, {kind}", f"{golden} | {answer}", equal(golden, answer), verdict == "right"
    found = table("agent/answers_found.yaml")
    for name in FORMATS:
        for response, answer, follows in found[name]:
            one = FORMATS[name].find(response)
            same = (one and (one.text, one.has_trailing_text)) == (answer and (answer, follows == "text"))
            yield f"where it stands, {name}", repr(response), same, True
    for kind, has_trailing_text in (("harmless", False), ("harmful", True)):
        for ending in found[kind]:
            one = FORMATS["boxed"].find(rf"\boxed{{42}}{ending}")
            yield (
                f"endings, {kind}",
                repr(ending),
                one is not None and (one.text, one.has_trailing_text) == ("42", has_trailing_text),
                True,
            )
    code = table("environments/tables/code_answers.yaml")
    for expected, answer, verdict, _ in code["printed"]:
        yield "code, printed", f"{expected} | {answer}", passes(expected, answer, function=False), verdict == "right"
    for expected, answer, verdict, _ in code["returned"]:
        [test] = parse_tests(json.dumps({"inputs": [[0]], "outputs": [expected], "fn_name": "f"})).cases
        yield (
            "code, returned",
            f"{expected} | {answer}",
            passes(test.expected, answer, function=True),
            verdict == "right",
        )


def main() -> None:
    counts: dict[str, list[int]] = {}
    for kind, pair, verdict, expected in judged():
        rows = counts.setdefault(kind, [0, 0, 0, 0])  # all, false negatives, false positives, no verdict
        rows[0] += 1
        if verdict == expected:
            continue
        fault = 3 if verdict is None else 1 if expected else 2
        rows[fault] += 1
        if "--wrong" in sys.argv:
            print(f"  {kind}: {pair}: {FAULTS[fault]}", flush=True)
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    for kind, (rows, *faults) in counts.items():
        told = "".join(f"; {FAULTS[number]}: {count}" for number, count in enumerate(faults, 1) if count)
        print(f"{kind}: {rows - sum(faults)} of {rows}{told}")


if __name__ == "__main__":
    main()
