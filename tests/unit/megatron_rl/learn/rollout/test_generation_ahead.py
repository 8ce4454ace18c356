"""Generation ahead of training: batches in order, at most max_lag steps ahead, and nothing lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bank_helpers import bank_in, rollout_driver
from core_helpers import here_of, quiet_safe_points, tiny_run, trajectory
from thread_ranks import on_threads
from waiting import until

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import GenerationRequest, PromptTooLong
from megatron_rl.learn.rollout import driver as driver_module
from megatron_rl.learn.rollout.agent_loop import AgentThread
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.driver import RolloutDriver
from megatron_rl.rank.control import Control
from megatron_rl.rank.safe_points import LeaveAgreed
from megatron_rl.recipe.config import RunConfig

PROMPTS = 3


class Agent(GroupedRolloutGenerator):
    """Agent that finishes ordinals in `held` only after `let`. Groups of ordinals in `dull` have equal rewards and have
    lost one answer, and prompts of ordinals in `long` are too long."""

    def __init__(self, held: Sequence[int] = (), dull: Sequence[int] = (), long: Sequence[int] = ()) -> None:
        self.begun: list[int] = []
        self.cancelled: list[int] = []
        self.dull, self.long = dull, long
        self.closed = 0
        self._held = {ordinal: threading.Event() for ordinal in held}

    def let(self, ordinal: int) -> None:
        self._held[ordinal].set()

    async def close(self) -> None:
        self.closed += 1

    def training_problems(self) -> Sequence[Problem]:
        return [Problem("3+4=", {})]

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        self.begun.append(request.ordinal)
        try:
            while request.ordinal in self._held and not self._held[request.ordinal].is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled.append(request.ordinal)
            raise
        if request.ordinal in self.long:
            await request.inference.generate(GenerationRequest([1] * 99, 1, request.sampling, 5, request.ordinal))
        dull = request.ordinal in self.dull
        rewards = [0.0 if dull else float(index % 2) for index in range(request.group_size - dull)]
        answers = [trajectory([1], [2], each) for each in rewards]
        return TrajectoryGroup(request.ordinal, request.problem, answers, {"timeout": 1} if dull else {})


def ahead(max_lag: int, dynamic: bool = False, **more: Any) -> RunConfig:
    grpo = {"prompts_per_step": PROMPTS, "dynamic_sampling": {"enabled": dynamic}}
    return tiny_run(grpo=grpo, training={"steps": 50}, **{"async": {"max_lag": max_lag, **more}})


async def refuse(request: GenerationRequest) -> None:
    raise PromptTooLong(f"a prompt of {len(request.prompt_tokens)} tokens")


@contextmanager
def driver_of(
    agent: Agent, config: RunConfig, folder: Path, attempt: int = 1, control: Control | None = None
) -> Iterator[RolloutDriver]:
    control = control or Control(0, 1)
    rank, ranks = control.rank, control.size
    role: Any = SimpleNamespace(index=rank, count=ranks, drives=True)
    inference: Any = SimpleNamespace(policy_version=0, busy_s=0.0, partial_answers=list, generate=refuse)
    refit: Any = SimpleNamespace(starved=False, finish=lambda: None)
    groups: Any = SimpleNamespace(control=control)
    bank = bank_in(folder, attempt, driver=rank, drivers=ranks)
    safe_points = quiet_safe_points()
    if ranks > 1:
        safe_points.connect(groups)
    loop = AgentThread(role, inference, safe_points, refit)
    driver = rollout_driver(agent, inference, bank, config, here_of(None, groups, safe_points), loop)
    try:
        yield driver
    finally:
        driver.stop()
        driver.close()


@pytest.fixture(autouse=True)
def _without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "exchange", lambda groups, *_: groups)  # each rank keeps its own


def ordinals(*batches: RolloutBatch) -> list[int]:
    return [group.ordinal for batch in batches for group in batch.groups]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_max_lag_further_batches_are_begun_while_a_step_trains(tmp_path: Path, max_lag: int) -> None:
    agent = Agent()
    with driver_of(agent, ahead(max_lag), tmp_path) as driver:
        batch = driver.collect(0)
        assert (ordinals(batch), batch.positions, batch.next_ordinal) == ([0, 1, 2], [0, 1, 2], PROMPTS)
        until(lambda: len(agent.begun) == (1 + max_lag) * PROMPTS, "the next ones are begun")
        assert sorted(agent.begun) == [*range((1 + max_lag) * PROMPTS)]
        assert ordinals(driver.collect(batch.next_ordinal)) == [3, 4, 5]


def test_nothing_is_generated_beyond_the_last_step(tmp_path: Path) -> None:
    agent = Agent()
    config = ahead(2).model_copy(update={"training": ahead(2).training.model_copy(update={"steps": 2})})
    with driver_of(agent, config, tmp_path) as driver:
        ordinal = driver.collect(driver.collect(0).next_ordinal).next_ordinal
    assert sorted(agent.begun) == [*range(ordinal)] == [*range(2 * PROMPTS)]
    assert agent.closed == 1


def test_groups_without_signal_and_prompts_too_long_are_settled_with_their_reasons(tmp_path: Path) -> None:
    agent = Agent(dull=[0, 4], long=[2])
    with driver_of(agent, ahead(1, dynamic=True), tmp_path) as driver:
        batch = driver.collect(0)
        assert driver._in_flight._recording._open == {}, "settled requests are kept"
    assert (ordinals(batch), batch.next_ordinal) == ([1, 3, 5], 6)
    assert batch.dropped == {0: "no signal", 2: "prompt too long", 4: "no signal"}
    assert batch.failures == {"timeout": 2}, "lost answers count, though no step trains on the group"


def test_overdue_groups_are_dropped_on_request(tmp_path: Path) -> None:
    agent = Agent(held=[1])
    with driver_of(agent, ahead(1, on_overdue="drop"), tmp_path) as driver:
        waiting = threading.Timer(0.2, agent.let, [1])
        waiting.start()
        first = driver.collect(0)
        assert ordinals(first) == [0, 1, 2], "not overdue: the next step may train on it too"
        waiting.join()

    agent = Agent(held=[4])
    with driver_of(agent, ahead(1, on_overdue="drop"), tmp_path / "again") as driver:
        second = driver.collect(driver.collect(0).next_ordinal)
        assert (ordinals(second), dict(second.dropped)) == ([3, 5, 6], {4: "overdue"})
        until(lambda: agent.cancelled == [4], "its answers are cancelled")


def test_the_age_of_a_group_begun_while_a_step_trains_counts_from_the_weights_before_that_step(tmp_path: Path) -> None:
    """Prompt 9 replaces the overdue prompt 4. It is begun while step 2 trains, with the weights after step 1."""
    agent = Agent(held=[4, 9])
    with driver_of(agent, ahead(1, on_overdue="drop"), tmp_path) as driver:
        second = driver.collect(driver.collect(0).next_ordinal)
        assert (ordinals(second), second.next_ordinal) == ([3, 5, 6], 7)
        until(lambda: 9 in agent.begun, "the next one is begun")
        giving_up = threading.Timer(10, agent.let, [9])
        giving_up.start()
        third = driver.collect(7)
        giving_up.cancel()
        assert (ordinals(third), dict(third.dropped)) == ([7, 8, 10], {9: "overdue"})


def test_ranks_agree_on_the_batch_and_each_rolls_out_its_share(tmp_path: Path) -> None:
    ranks, steps = 3, 4
    agents = [Agent() for _ in range(ranks)]
    batches: list[list[RolloutBatch]] = [[] for _ in range(ranks)]

    def drive(control: Control) -> None:
        rank = control.rank
        with driver_of(agents[rank], ahead(1), tmp_path, control=control) as driver:
            ordinal = 0
            for _ in range(steps):
                batches[rank].append(driver.collect(ordinal))
                ordinal = batches[rank][-1].next_ordinal

    on_threads(ranks, drive)
    for step, parts in enumerate(zip(*batches, strict=True)):
        assert sorted(ordinals(*parts)) == [*range(step * PROMPTS, (step + 1) * PROMPTS)]
        assert sorted(position for part in parts for position in part.positions) == [*range(PROMPTS)]
    begun = [ordinal for agent in agents for ordinal in agent.begun]
    assert sorted(begun) == [*range(len(begun))], "two ranks rolled out one prompt"


def test_groups_finished_ahead_survive_a_drain(tmp_path: Path) -> None:
    agent = Agent(held=[4])
    with driver_of(agent, ahead(1), tmp_path) as driver:
        driver.collect(0)
        until(lambda: {3, 4, 5} <= {*agent.begun}, "the next batch is begun")
        driver._safe_points.drain.asked = True
        with pytest.raises(LeaveAgreed):
            driver.collect(PROMPTS)
    again = Agent()
    with driver_of(again, ahead(1), tmp_path, attempt=2) as driver:
        assert ordinals(driver.collect(0), driver.collect(PROMPTS)) == [*range(2 * PROMPTS)]
    assert sorted(again.begun)[0] == 4, "those before it are in the bank"


def test_an_error_of_an_agent_is_raised(tmp_path: Path) -> None:
    class Broken(Agent):
        async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
            raise RuntimeError("no such tool")

    with driver_of(Broken(), ahead(1), tmp_path) as driver, pytest.raises(RuntimeError, match="no such tool"):
        driver.collect(0)
