"""Cost of HTTP: the same requests to the engine of this process, and through `python -m megatron_rl.run.serve`.

    python tests/benchmarks/server.py [--requests 500] [--repeats 3]

    one at a time   latency of an answer
    all at once     requests per second, whole and streamed

The model has 0.03 million random weights, so that HTTP dominates; prompts and answers have 16 tokens. All sides take
turns within one run, each with one thread for arithmetic, and the output has medians over turns. `processor` is the CPU
time of the engine's or the server's process, `client` that of this process for its requests: a few lines over asyncio's
streams, and for comparison httpx, on which OpenAI's client is built. No time is asserted. The last line is the server's
time over the engine's, all at once.
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
from dataclasses import astuple, dataclass
from pathlib import Path

import httpx
import psutil

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
sys.path.insert(0, HELPERS)
os.environ.setdefault("OMP_NUM_THREADS", "1")

# ruff: noqa: E402
from hf_helpers import PUBLISHED, publish

import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
from megatron_rl.checkpoint.source import find_source
from megatron_rl.generate.engine.engine import Engine
from megatron_rl.generate.engine.interface import GenerationRequest
from megatron_rl.generate.engine.opened_policy import open_policy
from megatron_rl.recipe.inference import Sampling

TOKENS = 16
PROMPT = list(range(1, TOKENS + 1))
TOKEN = "a-token-of-the-benchmark"
SAMPLING = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "min_tokens": TOKENS}

Ask = Callable[[int], Awaitable[object]]


@dataclass(frozen=True)
class Turn:
    """Seconds per request."""

    elapsed: float
    processor: float
    """CPU seconds of the process that answers."""
    client: float
    """CPU seconds of the client, if it is another process."""


@dataclass(frozen=True)
class Server:
    address: str
    process: psutil.Process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=3, help="turns for each side (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "tiny"
        publish(weights, PUBLISHED["Qwen2"])
        with serving(weights, Path(folder)) as server, open_policy(find_source(str(weights)), threads=1) as opened:
            turns = asyncio.run(compare(opened.engine, server, options.requests, options.repeats))
    print(f"{'ms a request':32} {'elapsed':>9} {'processor':>10} {'client':>8}    {'requests/s':>10}")
    for name, turn in turns.items():
        elapsed, processor, client = (1000 * seconds for seconds in astuple(turn))
        print(f"{name:32} {elapsed:9.2f} {processor:10.2f} {client:8.2f}    {1 / turn.elapsed:10.0f}")
    one, served_one = turns["engine, one at a time"], turns["server, one at a time"]
    print(f"one at a time HTTP adds {1000 * (served_one.elapsed - one.elapsed):.2f} ms to a request")
    together, served = turns["engine, all at once"], turns["server, all at once"]
    print(f"all at once HTTP adds {1000 * (served.elapsed - together.elapsed):.2f} ms to a request")
    print(f"ratio: {served.elapsed / together.elapsed:.2f}")


async def compare(engine: Engine, server: Server, requests: int, repeats: int) -> dict[str, Turn]:
    """Medians over turns, by way of asking."""

    async def directly(number: int) -> None:
        await engine.generate(GenerationRequest(PROMPT, 1, SAMPLING, number))

    async def whole(number: int) -> None:
        content = await post(server.address, {**BODY, "seed": number})
        assert json.loads(content)["usage"]["completion_tokens"] == TOKENS

    async def streamed(number: int) -> None:
        assert b"data: [DONE]\n\n" in await post(server.address, {**BODY, "seed": number, "stream": True})

    async with httpx.AsyncClient(
        base_url=f"http://{server.address}",
        headers={"Authorization": f"Bearer {TOKEN}"},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        timeout=600,
    ) as client:

        async def by_httpx(number: int) -> None:
            response = await client.post("/v1/completions", json={**BODY, "seed": number})
            assert response.json()["usage"]["completion_tokens"] == TOKENS

        few = max(20, requests // 10)
        ours, theirs = psutil.Process(), server.process
        ways: dict[str, tuple[Ask, int, bool, psutil.Process]] = {
            "engine, one at a time": (directly, few, False, ours),
            "server, one at a time": (whole, few, False, theirs),
            "engine, all at once": (directly, requests, True, ours),
            "server, all at once": (whole, requests, True, theirs),
            "server, all at once, by httpx": (by_httpx, requests, True, theirs),
            "server, all at once, streamed": (streamed, requests, True, theirs),
        }
        for ask, _, _, _ in ways.values():  # warm-up
            await ask(0)
        turns: dict[str, list[Turn]] = {name: [] for name in ways}
        for _ in range(repeats):
            for name, (ask, count, at_once, process) in ways.items():
                began, used, own = time.perf_counter(), processor_s(process), time.process_time()
                if at_once:
                    await asyncio.gather(*map(ask, range(count)))
                else:
                    for number in range(count):
                        await ask(number)
                elapsed, used = time.perf_counter() - began, processor_s(process) - used
                own = 0.0 if process is ours else time.process_time() - own
                turns[name].append(Turn(elapsed / count, used / count, own / count))
    return {name: Turn(*map(statistics.median, zip(*map(astuple, each), strict=True))) for name, each in turns.items()}


async def post(address: str, body: object) -> bytes:
    """Content of an answer, over a new connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200"), head
    return answer


def processor_s(process: psutil.Process) -> float:
    """CPU seconds of all threads of this process."""
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def serving(weights: Path, folder: Path) -> Iterator[Server]:
    """A server of these weights in another process."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    options = ["--token-file", str(token_file), "--threads", "1"]
    command = [sys.executable, "-m", "megatron_rl.run.serve", *options, str(weights)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"].removeprefix("http://")
            yield Server(address, psutil.Process(process.pid))
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
