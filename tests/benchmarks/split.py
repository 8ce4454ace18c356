"""Whether the simulation behind `mrl plan` is right: steps predicted and measured, with paced phases.

    python tests/benchmarks/split.py [--steps 8] [--token-ms 12]

Everything is real but the arithmetic: each inference replica is a process with the engine's own scheduler and pages
behind HTTP; a trainer asks for whole groups, admits by the bound on staleness, waits for each batch in order, and
publishes versions between two tokens. But a token takes a replica the seconds that its rows and caches are said to
need, and training as long as its tokens are said to. Lengths are drawn alike on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from launcher.simulate.lengths import Lognormal
from launcher.simulate.run import simulate
from launcher.simulate.scenario import Costs, DecodeSpeed, Scenario, Split, Work
from megatron_rl.inference.api import Completion, Delta, EngineLoad, GenerationRequest
from megatron_rl.inference.config import InferenceConfig, Sampling, pages_of
from megatron_rl.inference.pages import Pages
from megatron_rl.inference.plans import StepPlan
from megatron_rl.inference.scheduler import Scheduler
from megatron_rl.inference.transcript import RowAnswer
from megatron_rl.server.engine_thread import EngineThread

WORK = Work(prompts=12, group_size=4, prompt_tokens=20, lengths=Lognormal.with_mean(100, 300))
ROWS = 12
"""Of a replica: fewer than a batch brings, so that answers wait for each other."""
SEED = 1


def costs(token_s: float) -> Costs:
    """A step of 12 rows takes half as long again as one of 1, and full caches as much."""
    return Costs(
        decode=DecodeSpeed(((1, token_s), (ROWS, 1.5 * token_s)), token_s / (ROWS * 200)),
        rows=ROWS,
        prefill_token_s=token_s / 20,
        train_token_s=token_s / 25,
        train_square_s=0.0,
        training_replicas=1,
        step_s=10 * token_s,
        refit_s=10 * token_s,
    )


@dataclass(slots=True)
class Row:
    sampled: int
    limit: int


@dataclass(slots=True)
class PacedRunner:
    """Takes the time of a plan instead of computing it. Late wake-ups are made up for."""

    costs: Costs
    rows: dict[int, Row] = field(default_factory=dict)
    busy_s: float = 0.0
    due: float = 0.0
    """When the last plan was to be done (time.monotonic)."""

    def execute(self, plan: StepPlan) -> list[int]:
        for source, target in plan.moves:
            self.rows[target] = self.rows.pop(source)
        seconds = self.costs.prefill_token_s * sum(len(each.tokens) for each in plan.prefills)
        if plan.prefills:
            new = iter(plan.rows)
            for each in plan.prefills:
                for _ in each.own:
                    self.rows[next(new)] = Row(len(each.answer_tokens), each.sampling.max_new_tokens)
        else:
            count = len(plan.rows)
            cached = sum(WORK.prompt_tokens + self.rows[row].sampled for row in plan.rows)
            seconds += self.costs.decode.seconds(count, cached, 1)
            for row in plan.rows:
                self.rows[row].sampled += 1
        self.due += seconds
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.busy_s += seconds
        return [row for row in plan.rows if self.rows[row].sampled >= self.rows[row].limit]

    def answers(self, known: dict[int, int]) -> list[RowAnswer]:
        """Tokens that nobody reads, of rows of which so many are known."""
        new = {row: max(0, self.rows[row].sampled - count) for row, count in known.items()}
        return [RowAnswer(row, [1] * count, [0.0] * count) for row, count in new.items()]


class PacedEngine:
    """Implements `ServedEngine`: the engine's own scheduler over paced plans."""

    def __init__(self, costs: Costs) -> None:
        config = InferenceConfig(max_batch=ROWS)
        count, tokens = pages_of(config, 16, WORK.prompt_tokens + 512)
        self.runner = PacedRunner(costs)
        self.published = 0
        """Version of the weights that the next plan is executed with."""
        self._scheduler = Scheduler(config, Pages(count, tokens), end_ids=[0])

    @property
    def busy(self) -> bool:
        return self._scheduler.busy

    @property
    def load(self) -> EngineLoad:
        return self._scheduler.load

    @property
    def answered(self) -> Sequence[str]:
        return [*self._scheduler.answered]

    def submit(self, request: GenerationRequest, *, streamed: bool = False) -> str:
        if not self.busy:
            self.runner.due = time.monotonic()
        self._scheduler.submit(request, streamed=streamed)
        return request.id

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)

    def step(self) -> None:
        scheduler = self._scheduler
        if self.published != scheduler.policy_version:
            scheduler.publish(self.published, self.runner.answers(scheduler.wanted(scheduler.rows)))
        for plan_next in (scheduler.decode, scheduler.admit):
            if plan := plan_next():
                ended = self.runner.execute(plan)
                if wanted := scheduler.wanted(ended):
                    scheduler.retire(self.runner.answers(wanted))

    def take(self, request_id: str) -> list[Completion] | None:
        return self._scheduler.answered.pop(request_id, None)

    def take_deltas(self) -> list[tuple[str, Delta]]:
        return []


def serve(listener: socket.socket, costs: Costs) -> None:
    """A replica over HTTP, until its parent ends it."""
    engine = PacedEngine(costs)
    thread = EngineThread(engine)

    async def group(request: Request) -> Response:
        """All answers to a prompt: their tokens by version."""
        asked, news = await request.json(), asyncio.Event()
        prompt = [2 + asked["ordinal"]] * WORK.prompt_tokens
        open_ = [
            thread.submit(GenerationRequest(prompt, 1, Sampling(max_new_tokens=tokens), 0), False, news)
            for tokens in asked["tokens"]
        ]
        versions: list[int] = []
        while open_:
            await news.wait()
            news.clear()
            for one in open_:
                versions += (version for delta in one.unread() for version in delta.versions)
            open_ = [one for one in open_ if not one.answered]
        return JSONResponse({"versions": versions})

    async def publish(request: Request) -> Response:
        engine.published = (await request.json())["version"]
        return JSONResponse({"busy_s": engine.runner.busy_s})

    @asynccontextmanager
    async def running(app: Starlette) -> AsyncIterator[None]:
        thread.start()
        yield
        thread.stop("the benchmark is done")

    routes = [Route("/group", group, methods=["POST"]), Route("/publish", publish, methods=["POST"])]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes, lifespan=running), log_level="error"))
    asyncio.run(server.serve(sockets=[listener]))


@dataclass(slots=True)
class Measured:
    ended_at: list[float] = field(default_factory=list)
    """Of each step, seconds after the first prompt was asked."""
    busy_s: list[float] = field(default_factory=list)
    """Of the replicas, by then, mean over them."""
    staleness_max: int = 0


class Run:
    """The trainer's side: admits, trains in order, publishes."""

    def __init__(self, scenario: Scenario, clients: Sequence[httpx.AsyncClient], steps: int) -> None:
        self._scenario, self._clients, self._steps = scenario, clients, steps
        self._outstanding = [0] * len(clients)
        self._groups: dict[int, asyncio.Task[list[int]]] = {}

    async def go(self) -> Measured:
        work, costs, measured = self._scenario.work, self._scenario.costs, Measured()
        busy_before, began = fmean(await self._publish(0)), time.monotonic()
        for step in range(self._steps):
            for ordinal in range(len(self._groups), (step + 1 + self._scenario.max_lag) * work.prompts):
                self._groups[ordinal] = asyncio.create_task(self._answer(ordinal))
            batch = [self._groups[step * work.prompts + index] for index in range(work.prompts)]
            versions = [version for group in await asyncio.gather(*batch) for version in group]
            measured.staleness_max = max(measured.staleness_max, step - min(versions))
            longest = max(
                max(self._lengths(ordinal)) for ordinal in range(step * work.prompts, (step + 1) * work.prompts)
            )
            await asyncio.sleep(costs.train_s(len(versions), 0, longest) + costs.refit_s)
            busy_s = fmean(await self._publish(step + 1))
            measured.ended_at.append(time.monotonic() - began)
            measured.busy_s.append(busy_s - busy_before)
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        return measured

    def _lengths(self, ordinal: int) -> list[int]:
        return self._scenario.work.lengths.of_group(SEED, ordinal, self._scenario.work.group_size)

    async def _answer(self, ordinal: int) -> list[int]:
        """Versions of the tokens of a group."""
        tokens, prompts = self._lengths(ordinal), self._scenario.work.prompts
        replica = min(range(len(self._clients)), key=self._outstanding.__getitem__)
        if self._scenario.split.colocated:
            replica = ordinal % prompts * len(self._clients) // prompts
        self._outstanding[replica] += len(tokens)
        response = await self._clients[replica].post("/group", json={"ordinal": ordinal, "tokens": tokens})
        self._outstanding[replica] -= len(tokens)
        found: list[int] = response.raise_for_status().json()["versions"]
        assert len(found) == sum(tokens)
        return found

    async def _publish(self, version: int) -> list[float]:
        """Seconds that each replica has computed."""
        said = await asyncio.gather(*(one.post("/publish", json={"version": version}) for one in self._clients))
        return [response.raise_for_status().json()["busy_s"] for response in said]


async def measure(scenario: Scenario, steps: int, token_s: float) -> Measured:
    """A run over as many replicas as the scenario has, each a process of its own."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(scenario.split.replicas)]
    command = [sys.executable, __file__, "--token-ms", str(1e3 * token_s), "--listener"]
    processes = []
    try:
        for listener in listeners:
            processes.append(
                subprocess.Popen(
                    [*command, str(listener.fileno())], pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL
                )
            )
        urls = [f"http://127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        clients = [httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) for url in urls]
        try:
            return await Run(scenario, clients, steps).go()
        finally:
            for client in clients:
                await client.aclose()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="that are counted of each run")
    parser.add_argument("--token-ms", type=float, default=12.0, help="that one row takes for a token")
    parser.add_argument("--listener", type=int, help=argparse.SUPPRESS)  # a replica's
    options = parser.parse_args()
    token_s = options.token_ms / 1e3
    if options.listener is not None:
        serve(socket.socket(fileno=options.listener), costs(token_s))
        return
    print(f"{'':16}{'step, s':>24}{'':8}{'replicas busy':>18}{'':8}staleness")
    print(f"{'':16}{'predicted':>12}{'measured':>12}{'ratio':>8}{'predicted':>12}{'measured':>10}{'most':>12}")
    for split, lag in ((Split(4, 0, 4), 0), *((Split(2, 2, 2), lag) for lag in range(3))):
        share = costs(token_s)
        if split.colocated:  # twice as many train, and they send nothing
            share = replace(share, train_token_s=share.train_token_s / 2, refit_s=0.0)
        scenario = Scenario(WORK, share, split, lag)
        lead = 2 * lag
        done = simulate(scenario, lead + options.steps, SEED).steps
        found = asyncio.run(measure(scenario, lead + options.steps, token_s))
        first = [0.0, 0.0] if not lead else [done[lead - 1].ended_at, found.ended_at[lead - 1]]
        busy_first = found.busy_s[lead - 1] if lead else 0.0
        seconds = [done[-1].ended_at - first[0], found.ended_at[-1] - first[1]]
        busy = [sum(step.generated_s for step in done[lead:]), found.busy_s[-1] - busy_first]
        steps = [each / options.steps for each in seconds]
        shares = [each / total for each, total in zip(busy, seconds, strict=True)]
        name = "co-located" if split.colocated else f"{split}, lag {lag}"
        print(
            f"{name:16}{steps[0]:12.2f}{steps[1]:12.2f}{steps[0] / steps[1]:8.3f}{shares[0]:12.1%}{shares[1]:10.1%}"
            f"{found.staleness_max:12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
