"""Tokens per second, and per second of a processor, of replicas with each engine: the same weights and requests, in
turns, through the client of a run."""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from engine import long_tailed, prompts
from engine_peers import Asked, exactly
from vllm_replica_sides import ENGINES, Setting, Side, print_table, training

from megatron_rl.generate.engine.interface import GenerationRequest

PROMPT, EQUAL = 32, 128
"""Tokens of a prompt, and of an answer of equal length."""
COLUMNS = ("", "s", "range", "tokens/s", "/ mrl", "processor s", "tokens per processor s", "/ mrl")


def measure(setting: Setting, parts: Sequence[str], requests: int, repeats: int) -> None:
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch, ExitStack() as stack:
        trainer = stack.enter_context(training(setting))
        sides = [stack.enter_context(Side(trainer, engine, Path(scratch, engine))) for engine in ENGINES]
        for side in sides:
            side.publish(probed=side.name == ENGINES["vllm"])
        print(f"SmolLM2-135M-Instruct in {setting.dtype}, {setting.threads} threads, {setting.rows} answers at once")
        lengths = {"equal": [EQUAL] * requests, "tails": long_tailed(requests)}
        for part in parts:
            asked = prompts(requests, PROMPT, trainer.vocabulary, lengths[part])
            each = f"mean {statistics.fmean(lengths[part]):.0f}, longest {max(lengths[part])}"
            print_table((f"{requests} answers, {each}", *COLUMNS[1:]), rows_of(sides, asked, repeats))


def rows_of(sides: Sequence[Side], asked: Sequence[Asked], repeats: int) -> Iterator[list[str]]:
    """Measure in turns. Yields a row for each side."""
    tokens = sum(one.length for one in asked)
    elapsed: dict[str, list[float]] = {side.name: [] for side in sides}
    worked: dict[str, list[float]] = {side.name: [] for side in sides}
    for side in sides:
        answer(side, [Asked(one.prompt, 2) for one in asked])
    for _ in range(repeats):
        for side in sides:
            before, began = side.processor_s(), time.perf_counter()
            made = answer(side, asked)
            elapsed[side.name].append(time.perf_counter() - began)
            worked[side.name].append(side.processor_s() - before)
            if made != tokens:
                sys.exit(f"{side.name} made {made} tokens of {tokens}")
    first = sides[0].name
    seconds, processor = ({name: statistics.median(all_) for name, all_ in of.items()} for of in (elapsed, worked))
    for name in elapsed:
        yield [
            name,
            f"{seconds[name]:.1f}",
            f"{min(elapsed[name]):.1f} - {max(elapsed[name]):.1f}",
            f"{tokens / seconds[name]:.0f}",
            f"{seconds[first] / seconds[name]:.2f}",
            f"{processor[name]:.1f}",
            f"{tokens / processor[name]:.0f}",
            f"{processor[first] / processor[name]:.2f}",
        ]


def answer(side: Side, asked: Sequence[Asked]) -> int:
    """Have all requests answered at once. Returns the number of tokens."""

    async def all_of_them() -> int:
        answers = await asyncio.gather(*(side.pool.generate(request_of(key, one)) for key, one in enumerate(asked)))
        return sum(len(each.tokens) for completions in answers for each in completions)

    return asyncio.run(all_of_them())


def request_of(key: int, one: Asked) -> GenerationRequest:
    return GenerationRequest(one.prompt, one.samples, exactly(one.length), key=key)
