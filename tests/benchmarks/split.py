"""Accuracy of the formulas behind `mrl plan`: predicted and measured steps, with paced phases.

    python tests/benchmarks/split.py [--steps 8] [--token-ms 12]

Everything except the arithmetic is real. Each inference replica is a process with a run's replica service and the
engine's own scheduler and pages. A trainer sends requests through a run's pool, admits prompts within the bound on
staleness, waits for each batch in order, and publishes versions between two tokens with a run's refit, beside the next
step. But a token takes the seconds that the scenario gives for its rows and caches, and so do training and sending.
The prediction knows the distribution of the lengths, and the measured time of publishing a version. "sent first"
trains only when the weights have arrived, as GPUs do. Co-located ranks are replicas that each have their own pool and
share of the batch, with weights available at once.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import uvicorn

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from core_helpers import quiet_safe_points

from launcher.plan.costs import Costs, DecodeSpeed, Scenario, Split, Work
from launcher.plan.lengths import Lognormal
from launcher.plan.pace import pace
from megatron_rl.contract.attempt_records import ReplicaAddress
from megatron_rl.contract.files import write_atomic
from megatron_rl.contract.paths import Attempt, RunDir
from megatron_rl.contract.records import write
from megatron_rl.generate.engine.api import Completion, EngineLoad, GenerationRequest, PartialAnswer
from megatron_rl.generate.engine.pages import Pages
from megatron_rl.generate.engine.scheduler import Scheduler, StepPlan
from megatron_rl.generate.engine.transcript import RowAnswer
from megatron_rl.generate.refit.overlapped import OverlappedRefit
from megatron_rl.generate.refit.probe import Probe
from megatron_rl.generate.replica.app import ReplicaService
from megatron_rl.generate.replica.leader import Leader, LedEngineThread
from megatron_rl.generate.replica.serve import first_of
from megatron_rl.generate.replicas.dispatch import Dispatch
from megatron_rl.generate.replicas.link import ReplicaGone
from megatron_rl.generate.replicas.pool import ReplicaPool
from megatron_rl.generate.replicas.wire import PROTOCOL
from megatron_rl.learn.rollout.window import Window
from megatron_rl.model.platform.cpu import CpuDevice
from megatron_rl.rank.activity import Activity
from megatron_rl.recipe.inference import InferenceConfig, Sampling, pages_of

WORK = Work(prompts=12, group_size=4, prompt_tokens=20, lengths=Lognormal.with_mean(100, 300))
ROWS = 12
"""Rows of a replica: fewer than the answers of a batch, so that some wait."""
SEED = 1
LIMIT_S = 300.0
DIGEST, TOKEN = "of no configuration", "a token of this benchmark, and of nothing else"


def costs(token_s: float) -> Costs:
    """Seconds of a decode step: 12 rows take half as long again as one, and full caches the same."""
    return Costs(
        decode=DecodeSpeed(((1, token_s), (ROWS, 1.5 * token_s)), token_s / (ROWS * 200)),
        rows=ROWS,
        prefill_token_s=token_s / 20,
        train_token_s=token_s / 25,
        train_square_s=0.0,
        training_replicas=1,
        step_s=10 * token_s,
        refit_s=80 * token_s,
        trains_beside_refit=True,
    )


@dataclass(slots=True)
class Row:
    sampled: int
    limit: int


@dataclass(slots=True)
class PacedRunner:
    """Sleeps for the time of a plan instead of computing it, and makes up for late wake-ups."""

    costs: Costs
    rows: dict[int, Row] = field(default_factory=dict)
    busy_s: float = 0.0
    due: float = 0.0
    """Time at which the last plan is done (time.monotonic)."""

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
            seconds += self.costs.decode.step_s(count) + self.costs.decode.read_s(count) * (cached + count / 2)
            for row in plan.rows:
                self.rows[row].sampled += 1
        self.due += seconds
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.busy_s += seconds
        return [row for row in plan.rows if self.rows[row].sampled >= self.rows[row].limit]

    def answers(self, known: dict[int, int]) -> list[RowAnswer]:
        """Placeholder tokens of rows."""
        new = {row: max(0, self.rows[row].sampled - count) for row, count in known.items()}
        return [RowAnswer(row, [1] * count, [0.0] * count) for row, count in new.items()]


class PacedEngine:
    """Implements `LedEngine`: the engine's own scheduler over paced plans."""

    def __init__(self, costs: Costs) -> None:
        config = InferenceConfig(max_batch=ROWS)
        count, tokens = pages_of(config, 16, WORK.prompt_tokens + 512)
        self.runner = PacedRunner(costs)
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

    def submit(self, request: GenerationRequest) -> str:
        if not self.busy:
            self.runner.due = time.monotonic()
        self._scheduler.submit(request)
        return request.id

    def cancel(self, request_id: str) -> None:
        self._scheduler.cancel(request_id)

    def step(self) -> None:
        for plan_next in (self._scheduler.decode, self._scheduler.admit):
            if plan := plan_next():
                ended = self.runner.execute(plan)
                if wanted := self._scheduler.wanted(ended):
                    self._scheduler.retire(self.runner.answers(wanted))

    @property
    def busy_s(self) -> float:
        return self.runner.busy_s

    def take(self, request_id: str) -> list[Completion] | None:
        return self._scheduler.answered.pop(request_id, None)

    def partial_answers(self) -> list[PartialAnswer]:
        return self._scheduler.partial_answers(self._sampled())

    def publish(self, version: int) -> None:
        """Sample with these weights from the next token on."""
        self._scheduler.publish(version, self._sampled())

    def follow(self, waits: Callable[[], AbstractContextManager[None]]) -> None:
        raise AssertionError("it is one rank")

    def release_followers(self) -> None:
        """No-op: there are no other ranks."""

    def _sampled(self) -> list[RowAnswer]:
        return self.runner.answers(self._scheduler.wanted(self._scheduler.rows))


class PacedWeights:
    """Weights that are available at once, because the sender sleeps. Reports the computing time."""

    def __init__(self, engine: PacedEngine, busy: Path) -> None:
        self._engine, self._busy = engine, busy

    def receive(self, version: int, epoch: dict[str, Any] | None) -> Future[None]:
        return _done()

    def swap(self, version: int) -> None:
        self._engine.publish(version)
        write_atomic(self._busy, str(self._engine.runner.busy_s))


def _done() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


def busy_file(attempt: Attempt, number: int) -> Path:
    return attempt.folder / f"busy-{number}"


def serve(attempt: Attempt, number: int, start: int, costs: Costs) -> None:
    """Serve as a replica until the parent ends this process."""
    engine, replica = PacedEngine(costs), attempt.replica(number)
    replica.folder.mkdir(parents=True, exist_ok=True)
    listener = socket.create_server(("127.0.0.1", 0))
    leader = Leader(engine, PacedWeights(engine, busy_file(attempt, number)), None, Activity(replica, published=False))
    leader.version = 0
    address = ReplicaAddress(number, start, "127.0.0.1", listener.getsockname()[1], 1, DIGEST, PROTOCOL, time.time())
    service = ReplicaService(LedEngineThread(leader), address, TOKEN)
    config = uvicorn.Config(service.app, interface="asgi3", lifespan="off", log_level="error")

    async def run() -> None:
        async with service.engine.running():
            write(replica.listener, address)
            await first_of(
                uvicorn.Server(config).serve(sockets=[listener]),
                service.engine.watch(),
                service.until_over(asyncio.Event(), 1e9),
            )

    asyncio.run(run())


@dataclass(slots=True)
class Measured:
    ended_at: list[float] = field(default_factory=list)
    """Seconds after the first request, for each step."""
    busy_s: list[float] = field(default_factory=list)
    """Busy seconds of the replicas, mean over them, when they had the weights before those of each step, and at the
    end."""
    published_s: list[float] = field(default_factory=list)
    """Seconds to publish each version."""
    staleness_max: int = 0


class PacedTransfer:
    """Implements the part of `TransferRefit` that `OverlappedRefit` uses."""

    moved_bytes = 0

    def __init__(self, pool: ReplicaPool, seconds: float, published_s: list[float]) -> None:
        self._pool, self._seconds, self._published_s = pool, seconds, published_s

    def publish(self, version: int, probe: Probe | None = None) -> bool:
        began, starts = time.monotonic(), [*self._pool.starts()]
        for path, body in (("receive", {"epoch": {}}), ("swap", {"probe": None})):
            if path == "swap":
                time.sleep(self._seconds)
            for said in [self._pool.call(start, path, {"version": version, **body}, LIMIT_S) for start in starts]:
                with suppress(ReplicaGone):  # the others already have it
                    said.result(LIMIT_S)
        self._published_s.append(time.monotonic() - began)
        return True

    def abort(self) -> None:
        """No-op: a transfer ends soon."""

    def close(self) -> None:
        """No-op: there is no epoch."""


class Run:
    """The trainer's side: admits prompts, trains in order, publishes."""

    def __init__(self, scenario: Scenario, attempts: Sequence[Attempt]) -> None:
        """attempts: one for each pool of replicas."""
        self._scenario, self._attempts = scenario, attempts
        self.measured = Measured()
        self._pools = [ReplicaPool(Dispatch(one, DIGEST, TOKEN, 0, resumes=True, limit_s=LIMIT_S)) for one in attempts]
        refit_s = 0.0 if scenario.split.colocated else scenario.costs.refit_s
        self._refits: list[OverlappedRefit] = []
        for pool in self._pools:
            transfer: Any = PacedTransfer(pool, refit_s, self.measured.published_s)
            self._refits.append(OverlappedRefit(transfer, pool, CpuDevice(threads=1), quiet_safe_points()))
        self._groups: dict[int, asyncio.Task[list[int]]] = {}
        self._began = 0.0

    async def go(self, steps: int) -> Measured:
        self.start()
        await self.see(self._scenario.split.replicas)
        for step in range(steps):
            await self.step(step)
        await self.stop()
        return self.measured

    def start(self) -> None:
        for pool in self._pools:
            pool.start()
            pool.policy_version = 0

    async def see(self, count: int) -> None:
        """Wait for `count` replicas."""
        give_up = time.monotonic() + LIMIT_S
        while sum(len(pool.starts()) for pool in self._pools) != count:
            assert time.monotonic() < give_up, f"{count} replicas did not come up"
            await asyncio.sleep(0.1)

    async def step(self, step: int) -> None:
        work, costs, measured = self._scenario.work, self._scenario.costs, self.measured
        if not self._scenario.max_lag:
            await self._finish()
        self._began = self._began or time.monotonic()
        below = Window(work.prompts, first=step * work.prompts).end_of(1 + self._scenario.max_lag)
        for ordinal in range(len(self._groups), below):
            self._groups[ordinal] = asyncio.create_task(self._answer(ordinal))
        ordinals = range(step * work.prompts, (step + 1) * work.prompts)
        groups = await asyncio.gather(*(self._groups[ordinal] for ordinal in ordinals))
        versions = [version for group in groups for version in group]
        measured.staleness_max = max(measured.staleness_max, step - min(versions))
        longest = max(max(self._lengths(ordinal)) for ordinal in ordinals)
        if not costs.trains_beside_refit:
            await self._finish()
        await asyncio.sleep(costs.train_s(len(versions), 0, longest) - costs.step_s)
        await self._finish()
        measured.busy_s.append(self._busy_s())
        await asyncio.sleep(costs.step_s)
        measured.ended_at.append(time.monotonic() - self._began)
        for refit in self._refits:
            refit.publish(step + 1)

    async def _finish(self) -> None:
        for refit in self._refits:
            await asyncio.to_thread(refit.finish)

    def _busy_s(self) -> float:
        said = [float(file.read_text()) for attempt in self._attempts for file in attempt.folder.glob("busy-*")]
        return fmean(said) if said else 0.0

    async def stop(self) -> None:
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await self._finish()
        self.measured.busy_s.append(self._busy_s())

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    def _lengths(self, ordinal: int) -> list[int]:
        work, chance = self._scenario.work, Random(SEED << 64 | ordinal)
        lengths = work.lengths
        drawn = (lengths.median * math.exp(lengths.spread * chance.gauss(0, 1)) for _ in range(work.group_size))
        return [max(1, min(lengths.maximum, round(tokens))) for tokens in drawn]

    async def _answer(self, ordinal: int) -> list[int]:
        """Versions of the tokens of a group."""
        prompts = self._scenario.work.prompts
        pool = self._pools[ordinal % prompts * len(self._pools) // prompts]
        prompt, lengths = [2 + ordinal] * WORK.prompt_tokens, self._lengths(ordinal)
        requests = [GenerationRequest(prompt, 1, Sampling(max_new_tokens=tokens), 0, ordinal) for tokens in lengths]
        answers = await asyncio.gather(*map(pool.generate, requests))
        found = [version for (answer,) in answers for version in answer.versions]
        assert len(found) == sum(lengths)
        return found


def measure(scenario: Scenario, steps: int, token_s: float, folder: Path) -> Measured:
    """Run the scenario with its number of replicas, each a process."""
    pools = scenario.split.replicas if scenario.split.colocated else 1
    attempts = [RunDir(folder / str(number)).attempt(1) for number in range(pools)]
    for attempt in attempts:
        attempt.folder.mkdir(parents=True)
    run, processes = Run(scenario, attempts), []
    try:
        for number in range(scenario.split.replicas):
            processes.append(start_replica(number, folder / str(number % pools), token_s))
        return asyncio.run(run.go(steps))
    finally:
        run.close()
        for process in processes:
            process.kill()
            process.wait()


def start_replica(number: int, root: Path, token_s: float, start: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", __file__, "--token-ms", str(1e3 * token_s)]
    return subprocess.Popen([*command, "--replica", str(number), str(start), str(root)], stdin=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--token-ms", type=float, default=12.0, help="milliseconds of a token in one row")
    parser.add_argument("--replica", nargs=3, help=argparse.SUPPRESS)  # number, start and run directory
    options = parser.parse_args()
    token_s = options.token_ms / 1e3
    if options.replica is not None:
        number, start, root = options.replica
        serve(RunDir(root).attempt(1), int(number), int(start), costs(token_s))
        return
    print(f"{'':26}{'step, s':>24}{'':8}{'replicas busy':>18}{'':8}staleness")
    print(f"{'':26}{'predicted':>12}{'measured':>12}{'ratio':>8}{'predicted':>12}{'measured':>10}{'most':>12}")
    apart = Split(2, 2, 2)
    for split, lag, beside in ((Split(4, 0, 4), 0, True), *((apart, lag, True) for lag in range(3)), (apart, 1, False)):
        share = replace(costs(token_s), trains_beside_refit=beside)
        if split.colocated:  # twice the number trains
            share = replace(share, train_token_s=share.train_token_s / 2)
        scenario = Scenario(WORK, share, split, lag)
        lead = 2 * lag
        with tempfile.TemporaryDirectory() as folder:
            found = measure(scenario, lead + options.steps, token_s, Path(folder))
        predicted = replace(scenario, costs=replace(share, refit_s=fmean(found.published_s)))
        expected = pace(predicted)
        seconds = found.ended_at[-1] - (found.ended_at[lead - 1] if lead else 0.0)
        busy = (found.busy_s[-1] - found.busy_s[lead]) / seconds
        steps = [expected.step_s, seconds / options.steps]
        shares = [expected.generate_s / expected.step_s, busy]
        name = "co-located" if split.colocated else f"{split}, lag {lag}{'' if beside else ', sent first'}"
        print(
            f"{name:26}{steps[0]:12.2f}{steps[1]:12.2f}{steps[0] / steps[1]:8.3f}{shares[0]:12.1%}{shares[1]:10.1%}"
            f"{found.staleness_max:12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
