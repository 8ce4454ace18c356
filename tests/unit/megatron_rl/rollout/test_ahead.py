"""A driver whose agents go on while the ranks train: batches in order, as far ahead as the bound, nothing lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bank_helpers import bank_in
from core_helpers import quiet_safe_points, tiny_run, trajectory
from scripted_replica import until

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.config import RunConfig
from megatron_rl.inference.api import GenerationRequest, PromptTooLong
from megatron_rl.rank.safe_points import LeaveAgreed
from megatron_rl.rollout import driver as driver_module
from megatron_rl.rollout.agent_loop import AgentThread
from megatron_rl.rollout.batch import RolloutBatch
from megatron_rl.rollout.driver import RolloutDriver

PROMPTS = 3


class Agent(GroupedRolloutGenerator):
    """Answers an ordinal when it is let to; all of them, where nothing is held back. Groups of the ordinals in `dull`
    have equal rewards and have lost one answer."""

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


class Threads:
    """Stands in for torch.distributed where ranks are threads and a group is the rank's number."""

    ReduceOp = torch.distributed.ReduceOp

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._parts: list[torch.Tensor] = [torch.empty(0)] * ranks

    def all_reduce(self, tensor: torch.Tensor, op: Any, group: int) -> None:
        self._parts[group] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack(self._parts).amax(0))
        self._barrier.wait()


def ahead(max_lag: int, dynamic: bool = False, **more: Any) -> RunConfig:
    grpo = {"prompts_per_step": PROMPTS, "dynamic_sampling": {"enabled": dynamic}}
    return tiny_run(grpo=grpo, training={"steps": 50}, **{"async": {"max_lag": max_lag, **more}})


async def refuse(request: GenerationRequest) -> None:
    raise PromptTooLong(f"a prompt of {len(request.prompt_tokens)} tokens")


@contextmanager
def driver_of(
    agent: Agent, config: RunConfig, folder: Path, rank: int = 0, ranks: int = 1, attempt: int = 1
) -> Iterator[RolloutDriver]:
    role: Any = SimpleNamespace(index=rank, count=ranks, drives=True)
    inference: Any = SimpleNamespace(policy_version=0, busy_s=0.0, partial_answers=list, generate=refuse)
    refit: Any = SimpleNamespace(starved=False, finish=lambda: None)
    groups: Any = SimpleNamespace(control=rank)
    bank = bank_in(folder, attempt, driver=rank, drivers=ranks)
    safe_points = quiet_safe_points()
    loop = AgentThread(role, inference, safe_points, refit)
    driver = RolloutDriver(agent, agent.training_sets(), inference, bank, config, groups, safe_points, loop)
    try:
        yield driver
    finally:
        driver.stop()
        driver.close()


@pytest.fixture(autouse=True)
def _without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "dist", Threads(1))
    monkeypatch.setattr(driver_module, "exchange", lambda made, *_: made)  # each trains on what it made


def ordinals(*batches: RolloutBatch) -> list[int]:
    return [group.ordinal for batch in batches for group in batch.groups]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_while_a_step_trains_so_many_further_batches_are_answered(tmp_path: Path, max_lag: int) -> None:
    agent = Agent()
    with driver_of(agent, ahead(max_lag), tmp_path) as driver:
        batch = driver.collect(0)
        assert (ordinals(batch), batch.positions, batch.next_ordinal) == ([0, 1, 2], [0, 1, 2], PROMPTS)
        until(lambda: len(agent.begun) == (1 + max_lag) * PROMPTS, "the next ones are begun")
        assert sorted(agent.begun) == [*range((1 + max_lag) * PROMPTS)]
        assert ordinals(driver.collect(batch.next_ordinal)) == [3, 4, 5]


def test_a_prompt_that_takes_long_holds_up_its_own_batch_and_no_generation(tmp_path: Path) -> None:
    agent = Agent(held=[1])
    with driver_of(agent, ahead(1), tmp_path) as driver:
        threading.Timer(0.05, agent.let, [1]).start()
        assert ordinals(driver.collect(0)) == [0, 1, 2]
        assert {0, 1, 2, 3, 4, 5} <= {*agent.begun}


def test_the_run_answers_nothing_beyond_its_last_step(tmp_path: Path) -> None:
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
        assert driver._in_flight._recording._open == {}, "what is settled is kept for ever"
    assert (ordinals(batch), batch.next_ordinal) == ([1, 3, 5], 6)
    assert batch.dropped == {0: "no signal", 2: "prompt too long", 4: "no signal"}
    assert batch.failures == {"timeout": 2}, "what a group lost counts, though nothing trains on it"


def test_what_is_overdue_is_given_up_where_that_is_asked_for(tmp_path: Path) -> None:
    agent = Agent(held=[1])
    with driver_of(agent, ahead(1, on_overdue="drop"), tmp_path) as driver:
        waiting = threading.Timer(0.2, agent.let, [1])
        waiting.start()
        first = driver.collect(0)
        assert ordinals(first) == [0, 1, 2], "not overdue: it may be trained on one step later"
        waiting.join()

    agent = Agent(held=[4])
    with driver_of(agent, ahead(1, on_overdue="drop"), tmp_path / "again") as driver:
        second = driver.collect(driver.collect(0).next_ordinal)
        assert (ordinals(second), dict(second.dropped)) == ([3, 5, 6], {4: "overdue"})
        until(lambda: agent.cancelled == [4], "its answers are cancelled")


def test_groups_begun_while_a_step_trains_are_as_old_as_the_weights_that_it_replaces(tmp_path: Path) -> None:
    """Prompt 9 takes the place of the overdue 4, and is begun while step 2 trains, by the weights after step 1."""
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


def test_ranks_agree_on_the_batch_and_each_answers_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, steps = 3, 4
    monkeypatch.setattr(driver_module, "dist", Threads(ranks))
    agents = [Agent() for _ in range(ranks)]
    batches: list[list[RolloutBatch]] = [[] for _ in range(ranks)]

    def drive(rank: int) -> None:
        with driver_of(agents[rank], ahead(1), tmp_path, rank, ranks) as driver:
            ordinal = 0
            for _ in range(steps):
                batches[rank].append(driver.collect(ordinal))
                ordinal = batches[rank][-1].next_ordinal

    threads = [threading.Thread(target=drive, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    for step, parts in enumerate(zip(*batches, strict=True)):
        assert sorted(ordinals(*parts)) == [*range(step * PROMPTS, (step + 1) * PROMPTS)]
        assert sorted(place for part in parts for place in part.positions) == [*range(PROMPTS)]
    begun = [ordinal for agent in agents for ordinal in agent.begun]
    assert sorted(begun) == [*range(len(begun))], "two ranks answer one prompt"


def test_what_was_answered_ahead_outlives_a_drain(tmp_path: Path) -> None:
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
    assert sorted(again.begun)[0] == 4, "those before it were scored"


def test_an_agents_error_is_not_swallowed(tmp_path: Path) -> None:
    class Broken(Agent):
        async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
            raise RuntimeError("no such tool")

    with driver_of(Broken(), ahead(1), tmp_path) as driver, pytest.raises(RuntimeError, match="no such tool"):
        driver.collect(0)
