"""What HTTP costs: the same requests to the engine of this process, and through `python -m megatron_rl.server`.

    python tests/benchmarks/server.py [--requests 500] [--repeats 3]

one at a time   how much later an answer comes
all at once     requests a second, whole and streamed

A model of 0.03 million random weights, so that HTTP is most of what is seen; prompts of 16 tokens, answers of 16. All
take turns within one run; what is shown are medians over the turns. The client (httpx) is in this process and its work
is counted as the server's. No time is asserted. The last line is the server's time over the engine's, all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
sys.path.insert(0, HELPERS)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# ruff: noqa: E402
from hf_helpers import PUBLISHED, publish

import megatron_rl.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.inference.api import GenerationRequest
from megatron_rl.inference.config import Sampling
from megatron_rl.inference.engine import Engine
from megatron_rl.standalone import open_policy

TOKENS = 16
PROMPT = list(range(1, TOKENS + 1))
TOKEN = "a-token-of-the-benchmark"
SAMPLING = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "min_tokens": TOKENS}

Ask = Callable[[int], Awaitable[object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "tiny"
        publish(weights, PUBLISHED["Qwen2"])
        with server(weights, Path(folder)) as address, open_policy(str(weights), threads=1) as opened:
            times = asyncio.run(compare(opened.engine, address, options.requests, options.repeats))
    few = max(20, options.requests // 10)
    one, served_one = times["engine, one at a time"] / few, times["server, one at a time"] / few
    together, served = times["engine, all at once"], times["server, all at once"]
    print(f"{'':30} {'ms a request':>14} {'requests/s':>12}")
    for name, seconds in times.items():
        count = few if name.endswith("time") else options.requests
        print(f"{name:30} {1000 * seconds / count:14.2f} {count / seconds:12.0f}")
    print(f"one at a time HTTP adds {1000 * (served_one - one):.2f} ms to a request")
    print(f"all at once HTTP adds {1000 * (served - together) / options.requests:.2f} ms to a request")
    print(f"ratio: {served / together:.2f}")


async def compare(engine: Engine, address: str, requests: int, repeats: int) -> dict[str, float]:
    """Seconds, the median over the turns, of each way to ask."""

    async def directly(number: int) -> None:
        await engine.generate(GenerationRequest(PROMPT, 1, SAMPLING, number))

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(
        base_url=address, headers=headers, limits=httpx.Limits(max_connections=None), timeout=600
    ) as client:

        async def over_http(number: int) -> None:
            response = await client.post("/v1/completions", json={**BODY, "seed": number})
            assert response.json()["usage"]["completion_tokens"] == TOKENS

        async def streamed(number: int) -> None:
            response = await client.post("/v1/completions", json={**BODY, "seed": number, "stream": True})
            assert response.text.endswith("data: [DONE]\n\n")

        few = max(20, requests // 10)
        ways: dict[str, tuple[Ask, int, bool]] = {
            "engine, one at a time": (directly, few, False),
            "server, one at a time": (over_http, few, False),
            "engine, all at once": (directly, requests, True),
            "server, all at once": (over_http, requests, True),
            "server, streamed, all at once": (streamed, requests, True),
        }
        for ask, _, _ in ways.values():  # what is slow once only
            await ask(0)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, (ask, count, at_once) in ways.items():
                began = time.perf_counter()
                if at_once:
                    await asyncio.gather(*map(ask, range(count)))
                else:
                    for number in range(count):
                        await ask(number)
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(turns) for name, turns in seconds.items()}


@contextmanager
def server(weights: Path, folder: Path) -> Iterator[str]:
    """The address of a server of these weights in a process of its own."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    command = [sys.executable, "-m", "megatron_rl.server", "--token-file", str(token_file), str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
