"""Cost of the policy endpoint: calls of programs in another process, beside asking the engine directly.

    python tests/benchmarks/endpoint.py [--calls 500] [--programs 256] [--turns 4] [--repeats 3]

    a call          an engine that answers at once with 16 tokens, so that the rest is the endpoint's: one program, and
                    all programs at once
    a conversation  the engine of this project with a model of 0.03 million random weights: conversations of several
                    turns by a class of ours (MultiTurnAgent), and the same ones by programs

All sides take turns within one run, and the output has medians over turns. `core` is the CPU time of the process with
engine and endpoint, `client` that of the programs' process, which uses a few lines over asyncio's streams. No time is
asserted. The last line is what a call through the endpoint costs this process beyond asking the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

HELPERS = str(Path(__file__).resolve().parents[1] / "helpers")
sys.path.insert(0, HELPERS)
os.environ.setdefault("OMP_NUM_THREADS", "1")

TOKENS = 16
"""Tokens of each answer."""
OBSERVATION = "?"
"""Text between two answers."""
PROMPT = "Next: "


@dataclass(frozen=True)
class Turn:
    """Seconds per call."""

    elapsed: float
    core: float
    client: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="calls of the single program (default: 500)")
    parser.add_argument("--programs", type=int, default=256, help="programs at once (default: 256)")
    parser.add_argument("--turns", type=int, default=4, help="calls of each of these (default: 4)")
    parser.add_argument("--repeats", type=int, default=3, help="turns for each side (default: 3)")
    parser.add_argument("--as-programs", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_programs:
        asyncio.run(programs())
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(options, Path(folder)))


async def compare(options: argparse.Namespace, folder: Path) -> None:
    calls, together = options.calls // options.turns * options.turns, options.programs * options.turns
    async with programs_process() as client:
        ways = await ways_of_calls(options, client)
        found = await in_turns(ways, options.repeats, client)
        print(f"{'ms a call':34} {'elapsed':>9} {'core':>9} {'client':>9}")
        counts = {name: together if "at once" in name else calls for name in ways}
        for name, turn in found.items():
            print(f"{name:34} " + " ".join(f"{1000 * each / counts[name]:9.3f}" for each in astuple(turn)))
        of_conversations = await conversations(options, client, folder)
        tokens = together * TOKENS
        print(f"\n{options.programs} conversations of {options.turns} turns")
        for name, turn in of_conversations.items():
            core = f"{1000 * turn.core / together:.3f} ms of a core a call"
            print(f"{name:34} {tokens / turn.elapsed:9.0f} tokens/s, {core}")
    direct, asked = found["engine, one at a time"], found["completions, one at a time"]
    print(f"a call through the endpoint adds {1000 * (asked.core - direct.core) / calls:.2f} ms of a core")


Way = Callable[[], Awaitable[object]]


async def in_turns(ways: Mapping[str, Way], repeats: int, client: Client) -> dict[str, Turn]:
    """Medians over turns. The first, unmeasured turn is a warm-up."""
    turns: dict[str, list[Turn]] = {name: [] for name in ways}
    ours = psutil.Process()
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            began, core, theirs = time.perf_counter(), cpu_s(ours), cpu_s(client.process)
            await way()
            elapsed = time.perf_counter() - began
            if repeat:
                turns[name].append(Turn(elapsed, cpu_s(ours) - core, cpu_s(client.process) - theirs))
    return {name: Turn(*map(statistics.median, zip(*map(astuple, each), strict=True))) for name, each in turns.items()}


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def ways_of_calls(options: argparse.Namespace, client: Client) -> dict[str, Way]:
    from server_helpers import byte_tokenizer, encode

    from megatron_rl.agent.endpoint.endpoint import PolicyEndpoint
    from megatron_rl.generate.engine.api import Completion, GenerationRequest
    from megatron_rl.model.chat.chat import Chat
    from megatron_rl.recipe.endpoint import EndpointConfig
    from megatron_rl.recipe.inference import Sampling

    class AtOnce:
        async def generate(self, request: GenerationRequest) -> list[Completion]:
            tokens = encode("x" * TOKENS)
            return [Completion(tokens, [-1.0] * TOKENS, "length", [0] * TOKENS) for _ in range(request.num_samples)]

    engine, sampling = AtOnce(), Sampling(max_new_tokens=TOKENS)
    endpoint = await PolicyEndpoint.open(Chat(byte_tokenizer()), EndpointConfig())

    async def directly() -> None:
        for number in range(options.calls // options.turns * options.turns):
            await engine.generate(GenerationRequest(encode(PROMPT), 1, sampling, number))

    def rollouts(kind: str, programs: int, *, at_once: bool) -> Way:
        async def one(number: int) -> None:
            async with endpoint.session(engine, sampling, number, None) as session:
                await client.run(url=session.base_url, kind=kind, turns=options.turns)

        async def run() -> None:
            if at_once:
                await asyncio.gather(*map(one, range(programs)))
            else:
                for number in range(programs):
                    await one(number)

        return run

    few = options.calls // options.turns
    return {
        "engine, one at a time": directly,
        **{f"{kind}, one at a time": rollouts(kind, few, at_once=False) for kind in KINDS},
        **{f"{kind}, {options.programs} at once": rollouts(kind, options.programs, at_once=True) for kind in KINDS},
    }


async def conversations(options: argparse.Namespace, client: Client, folder: Path) -> dict[str, Turn]:
    from hf_helpers import PUBLISHED, publish

    import megatron_rl.model.platform.megatron_core  # noqa: F401  before the modules below import megatron-core themselves
    from megatron_rl.agent.api import GroupRolloutRequest
    from megatron_rl.agent.endpoint.agent import EndpointAgent, RunResult
    from megatron_rl.agent.endpoint.session import RolloutSession
    from megatron_rl.agent.multi_turn import MultiTurnAgent
    from megatron_rl.agent.scoring import RolloutLimits
    from megatron_rl.agent.trajectories import Problem
    from megatron_rl.checkpoint.source import find_source
    from megatron_rl.generate.engine.api import Completion, GenerationRequest, InferenceInterface
    from megatron_rl.generate.engine.opened_policy import open_policy
    from megatron_rl.recipe.endpoint import EndpointConfig
    from megatron_rl.recipe.inference import Sampling

    class Unlimited:
        """The engine, whose answers end as if the model had ended them: a class ends at an answer that is cut off."""

        def __init__(self, engine: InferenceInterface) -> None:
            self._engine = engine

        async def generate(self, request: GenerationRequest) -> list[Completion]:
            return [replace(one, finish_reason="stop") for one in await self._engine.generate(request)]

    class Problems:
        def training_problems(self) -> Sequence[Problem]:
            return []

        def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
            return {}

    class OfOurs(Problems, MultiTurnAgent):
        max_turns = options.turns

        def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str:
            return OBSERVATION

        def get_trajectory_reward(
            self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: Any
        ) -> float:
            assert len(responses) == options.turns, responses
            return 1.0

    class Programs(Problems, EndpointAgent):
        async def run(self, problem: Problem, session: RolloutSession, limits: RolloutLimits) -> RunResult:
            await client.run(url=session.base_url, kind="completions", turns=options.turns)
            return RunResult(1.0)

    weights = folder / "tiny"
    publish(weights, PUBLISHED["Qwen2"] | {"max_position_embeddings": 256})
    with open_policy(find_source(str(weights)), threads=1) as opened:
        engine = Unlimited(opened.engine)
        sampling = Sampling(max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        agents = {
            "class of ours": OfOurs(None, opened.tokenizer),
            "programs": Programs(EndpointConfig(concurrency=options.programs), opened.tokenizer),
        }

        def rollouts(agent: Any) -> Way:
            async def run() -> None:
                asked = GroupRolloutRequest(
                    0, Problem(PROMPT, {}), options.programs, sampling, 1, engine, RolloutLimits(600)
                )
                group = await agent.group_rollout(asked)
                assert len(group.trajectories) == options.programs, group.failures

            return run

        found = await in_turns({name: rollouts(agent) for name, agent in agents.items()}, options.repeats, client)
        for agent in agents.values():
            await agent.close()
        return found


# The programs, in their own process

KINDS = ("completions", "chat", "generate")


class Client:
    """The process of the programs: a line of JSON for each of them, and one when it has ended."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child, self._ended = child, dict[int, asyncio.Future[None]]()
        self.process = psutil.Process(child.pid)
        self._reading = asyncio.ensure_future(self._read())

    async def run(self, **program: Any) -> None:
        number = len(self._ended)
        self._ended[number] = asyncio.get_running_loop().create_future()
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps({"number": number, **program}).encode() + b"\n")
        await self._ended[number]

    async def _read(self) -> None:
        assert self._child.stdout is not None
        async for line in self._child.stdout:
            self._ended[int(line)].set_result(None)

    async def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        await self._child.wait()
        await self._reading


@asynccontextmanager
async def programs_process() -> AsyncIterator[Client]:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, __file__, "--as-programs", stdin=pipe, stdout=pipe)
    client = Client(child)
    try:
        yield client
    finally:
        await client.close()


async def programs() -> None:
    """Run the programs that stdin names, all at once."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    async for line in reader:
        task = asyncio.ensure_future(program(**json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)


async def program(number: int, url: str, kind: str, turns: int) -> None:
    """Have a conversation with the model, over one connection."""
    host, _, path = url.removeprefix("http://").partition("/")
    name, _, port = host.rpartition(":")
    reader, writer = await asyncio.open_connection(name, int(port))
    path = f"/{path.removesuffix('/v1')}/inference/v1/generate" if kind == "generate" else f"/{path}/"
    path += {"completions": "completions", "chat": "chat/completions", "generate": ""}[kind]
    text, tokens, messages = PROMPT, [*range(30)], [{"role": "user", "content": PROMPT}]
    for _ in range(turns):
        body = {
            "completions": {"prompt": text},
            "chat": {"messages": messages},
            "generate": {"token_ids": tokens},
        }[kind]
        choice = (await post(reader, writer, host, path, body))["choices"][0]
        text += choice.get("text", "") + OBSERVATION
        tokens = [*tokens, *choice.get("token_ids", []), *range(30, 40)]
        messages = [*messages, choice.get("message"), {"role": "user", "content": OBSERVATION}]
    writer.close()
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


async def post(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str, body: object
) -> dict[str, Any]:
    content = json.dumps(body).encode()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    answer: dict[str, Any] = json.loads(await reader.readexactly(length))
    assert head.startswith(b"HTTP/1.1 200"), answer
    return answer


if __name__ == "__main__":
    main()
