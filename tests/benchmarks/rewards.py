"""Cost of scoring an answer in a confined child process, beside scoring it in this one.

    python tests/benchmarks/rewards.py [--answers 400] [--programs 40] [--workers 2]

A worker compares two numbers with a trivial function, which leaves the cost of the round trip, and mathematical answers
with math-verify. A program runs in its own process, beside `exec` of the same text. Turns are interleaved block by
block; elapsed time of answers one after the other and of many at once; the least of the blocks counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import logging
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from megatron_rl.agent.sandbox.limits import ProcessLimits
from megatron_rl.agent.sandbox.process_pools import ProgramPool, WorkerPool

LIMITS = ProcessLimits(wall_s=600.0, cpu_s=600, memory_bytes=2**32)
PAIRS = [["1/2", r"\frac{1}{2}"], [r"2\sqrt{2}", r"\sqrt{8}"], ["34", "35"], ["x+1", "1+x"], ["[0, 1)", r"[0,1\,)"]]
PROGRAM = "print(sum(map(int, '3 4'.split())))"
BLOCKS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=400)
    parser.add_argument("--programs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} processors, load {load:.1f}; {options.workers} workers", flush=True)
    asyncio.run(compare(options.answers, options.programs, options.workers))


async def compare(answers: int, programs: int, workers: int) -> None:
    from megatron_rl.agent.environments.math.equality import equal

    trivial = WorkerPool("math:isqrt", workers, LIMITS)
    verifier = WorkerPool("megatron_rl.agent.environments.math.equality:equal", workers, LIMITS)
    running = ProgramPool(workers)

    async def in_process(work: Callable[[], Any]) -> None:
        work()

    def exec_here() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(PROGRAM, {})

    await _both(
        "a trivial reward",
        answers,
        lambda number: in_process(partial(divmod, number, 2)),
        lambda number: trivial.ask(number),
    )
    await _both(
        "math-verify",
        max(1, answers // 4),
        lambda number: in_process(partial(equal, PAIRS[number % len(PAIRS)])),
        lambda number: verifier.ask(PAIRS[number % len(PAIRS)]),
    )
    await _both(
        "a program",
        programs,
        lambda _: in_process(exec_here),
        lambda _: running.run(PROGRAM, "", LIMITS),
    )
    for pool in (trivial, verifier, running):
        pool.close()


async def _both(
    name: str, count: int, here: Callable[[int], Awaitable[Any]], there: Callable[[int], Awaitable[Any]]
) -> None:
    """Seconds per answer, by way of scoring."""
    await asyncio.gather(*map(there, range(8)))  # starts the workers
    seconds: dict[str, list[float]] = {"here": [], "there": [], "together": []}
    for _ in range(BLOCKS):
        for kind, ask in (("here", here), ("there", there)):
            began = time.perf_counter()
            for number in range(count):
                await ask(number)
            seconds[kind].append((time.perf_counter() - began) / count)
        began = time.perf_counter()
        await asyncio.gather(*map(there, range(count)))
        seconds["together"].append((time.perf_counter() - began) / count)
    alone, away, together = (min(seconds[kind]) * 1e6 for kind in ("here", "there", "together"))
    print(
        f"{name:18} {alone:9.1f} us in this process  {away:9.1f} us in a child (+{away - alone:.1f})  "
        f"{together:9.1f} us each where {count} are asked at once",
        flush=True,
    )


if __name__ == "__main__":
    main()
