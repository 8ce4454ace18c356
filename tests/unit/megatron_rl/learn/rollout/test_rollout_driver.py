"""Prompts of each step without generation ahead: in ordinal order, each settled once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
from bank_helpers import bank_in, rollout_driver
from core_helpers import here_of, quiet_safe_points, tiny_run, trajectory
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from thread_ranks import on_threads

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.generate.engine.interface import PromptTooLong
from megatron_rl.learn.rollout import driver as driver_module
from megatron_rl.learn.rollout.agent_loop import EngineInTurn
from megatron_rl.learn.rollout.bank.file import bank_files, scan
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.driver import RolloutDriver
from megatron_rl.learn.rollout.stream import PromptStream
from megatron_rl.learn.rollout.window import NOTHING_DRAWN, Drawn
from megatron_rl.rank.control import Control
from megatron_rl.recipe.config import RunConfig

PROBLEMS = [Problem(str(number), {"number": number}) for number in range(7)]


class Agent(GroupedRolloutGenerator):
    """Agent without a model. Groups of ordinals in `dull` have equal rewards, and prompts of ordinals in `long` are too
    long."""

    def __init__(self, dull: Set[int] = frozenset(), long: Set[int] = frozenset()) -> None:
        self.dull, self.long = dull, long
        self.requests: list[GroupRolloutRequest] = []
        self.closed = 0

    async def close(self) -> None:
        self.closed += 1

    def training_problems(self) -> Sequence[Problem]:
        return PROBLEMS

    async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
        self.requests.append(request)
        if request.ordinal in self.long:
            raise PromptTooLong("a prompt of 99 tokens")
        rewards = [0.0 if request.ordinal in self.dull else float(i % 2) for i in range(request.group_size)]
        trajectories = [trajectory([1], [2], reward) for reward in rewards]
        return TrajectoryGroup(request.ordinal, request.problem, trajectories, {})


@contextmanager
def driver_of(
    agent: Agent,
    config: RunConfig,
    rank: int = 0,
    ranks: int = 1,
    policy_version: int = 0,
    folder: Path | None = None,
    attempt: int = 1,
    next_ordinal: int = 0,
    drawn: Drawn = NOTHING_DRAWN,
    control: Control | None = None,
) -> Iterator[RolloutDriver]:
    groups: Any = SimpleNamespace(control=control)
    done = {"release_followers": lambda: None, "end_phase": lambda: None}
    engine: Any = SimpleNamespace(policy_version=policy_version, busy_s=0.0, partial_answers=list, **done)
    role: Any = SimpleNamespace(index=rank, count=ranks, drives=True)
    safe_points = quiet_safe_points()
    if ranks > 1:
        safe_points.connect(groups)
    with TemporaryDirectory() as temporary:
        bank = bank_in(
            folder or Path(temporary),
            attempt,
            config.resume,
            policy_version=int(attempt > 1),
            next_ordinal=next_ordinal,
        )
        loop = EngineInTurn(role, engine, safe_points)
        here = here_of(None, groups, safe_points)
        driver = rollout_driver(agent, engine, bank, config, here, loop, drawn)
        yield driver
        driver.stop()
        driver.close()


def collect(
    agent: Agent, config: RunConfig, ranks: int, steps: int = 1, policy_version: int = 0
) -> list[list[RolloutBatch]]:
    """[steps][ranks] batches."""
    batches: list[list[Any]] = [[None] * ranks for _ in range(steps)]

    def drive(control: Control) -> None:
        rank = control.rank
        with driver_of(agent, config, rank, ranks, policy_version, control=control) as driver:
            ordinal = 0
            for step in range(steps):
                batches[step][rank] = driver.collect(ordinal)
                ordinal = batches[step][rank].next_ordinal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver_module, "exchange", lambda groups, *_: groups)  # each rank keeps its own
        on_threads(ranks, drive)
    return batches


def ordinals(step: list[RolloutBatch]) -> list[int]:
    return [group.ordinal for batch in step for group in batch.groups]


def dropped(step: list[RolloutBatch]) -> dict[int, str]:
    """Dropped ordinals of all drivers, each reported once."""
    found = {ordinal: reason for batch in step for ordinal, reason in batch.dropped.items()}
    assert len(found) == sum(len(batch.dropped) for batch in step)
    return found


def dynamic(prompts: int, rounds: int, **resume: str) -> RunConfig:
    grpo = {"prompts_per_step": prompts, "dynamic_sampling": {"enabled": True, "max_rounds": rounds}}
    return tiny_run(grpo=grpo, resume=resume)


@examples(15)
@given(prompts=st.integers(1, 9), ranks=st.integers(1, 4), steps=st.integers(1, 3))
def test_a_batch_is_the_next_ordinals_for_any_number_of_ranks(prompts: int, ranks: int, steps: int) -> None:
    config = tiny_run(grpo={"prompts_per_step": prompts})
    for number, step in enumerate(collect(Agent(), config, ranks, steps)):
        first = number * prompts
        assert sorted(ordinals(step)) == list(range(first, first + prompts))
        assert sorted(position for batch in step for position in batch.positions) == list(range(prompts))
        assert {(batch.first_ordinal, batch.next_ordinal) for batch in step} == {(first, first + prompts)}
        assert all(not batch.dropped and batch.rounds == 1 for batch in step)
        sizes = [len(batch.groups) for batch in step]
        assert max(sizes) - min(sizes) <= 1


def test_a_request_has_all_that_its_answers_depend_on() -> None:
    agent = Agent()
    config = tiny_run(grpo={"prompts_per_step": 5, "group_size": 6}, training={"seed": 3})
    collect(agent, config, ranks=1, steps=2, policy_version=4)
    stream = PromptStream(PROBLEMS, 3)
    for ordinal, request in enumerate(agent.requests):
        assert request.ordinal == ordinal
        assert request.problem == stream.problem(ordinal)
        assert request.group_size == 6
        assert request.sampling == config.sampling
        assert request.key == group_key(3, ordinal, 0, 4)
    assert len({request.key for request in agent.requests}) == 10
    assert agent.closed == 1


DULL = st.sets(st.integers(0, 60), max_size=45)


@examples(30)
@given(dull=DULL, prompts=st.integers(1, 6), rounds=st.integers(1, 8), ranks=st.integers(1, 3), steps=st.integers(1, 3))
def test_dynamic_sampling_trains_on_the_first_with_signal_and_settles_every_ordinal_once(
    dull: set[int], prompts: int, rounds: int, ranks: int, steps: int
) -> None:
    expected_first = 0
    for step in collect(Agent(dull), dynamic(prompts, rounds), ranks, steps):
        one = step[0]
        trained = ordinals(step)
        assert len(trained) == len(set(trained)) == prompts
        assert sorted([*trained, *dropped(step)]) == list(range(expected_first, one.next_ordinal))
        assert {(batch.next_ordinal, batch.rounds) for batch in step} == {(one.next_ordinal, one.rounds)}
        assert set(dropped(step).values()) <= {"no signal"}
        assert dropped(step).keys() <= dull
        by_position = sorted(
            (position, group.ordinal) for b in step for position, group in zip(b.positions, b.groups, strict=True)
        )
        assert by_position == [*enumerate(sorted(trained))]
        if one.next_ordinal - expected_first < rounds * prompts:
            assert not dull & set(trained)
        expected_first = one.next_ordinal


@examples(15)
@given(dull=DULL, prompts=st.integers(1, 6), rounds=st.integers(1, 4), ranks=st.integers(2, 4))
def test_dynamic_batches_do_not_depend_on_the_ranks(dull: set[int], prompts: int, rounds: int, ranks: int) -> None:
    config = dynamic(prompts, rounds)
    for one, many in zip(collect(Agent(dull), config, 1, 2), collect(Agent(dull), config, ranks, 2), strict=True):
        assert sorted(ordinals(one)) == sorted(ordinals(many))
        assert (dropped(one), one[0].next_ordinal) == (dropped(many), many[0].next_ordinal)


def test_surplus_groups_are_secured_by_a_checkpoint_that_begins_after_the_driver_has_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(driver_module, "exchange", lambda groups, *_: groups)
    with driver_of(Agent(dull={0, 1, 2}), dynamic(4, 8), folder=tmp_path) as driver:
        batch = driver.collect(0)
        assert (batch.next_ordinal, batch.drawn.below) == (7, 9)
        driver.stop()
        driver.begin_checkpoint(1, 7, 1)()
        heads = [entry.head for file in bank_files(tmp_path) for entry in scan(file)[0]]
        assert {7, 8} <= {head["ordinal"] for head in heads if head["kind"] == "group"}


def test_a_step_of_surplus_groups_alone_has_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "exchange", lambda groups, *_: groups)
    with driver_of(Agent(dull={*range(8)}), dynamic(4, 8)) as driver:
        assert ordinals([driver.collect(0)]) == [8, 9, 10, 11]
        second = driver.collect(12)  # a third was usable, so 12 are drawn
        assert (second.drawn.below, second.rounds) == (24, 1)
        third = driver.collect(16)
        assert (ordinals([third]), third.rounds) == ([16, 17, 18, 19], 0)


def test_surplus_groups_are_carried_into_the_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also if the process dies after the checkpoint between the two steps."""
    monkeypatch.setattr(driver_module, "exchange", lambda groups, *_: groups)
    config = dynamic(4, 8, partial="regenerate")
    agent, again = Agent(dull={0, 1, 2}, long={8}), Agent(long={8})
    with driver_of(agent, config, folder=tmp_path / "bank") as driver:
        first = driver.collect(0)
        assert (ordinals([first]), first.next_ordinal, first.drawn) == ([3, 4, 5, 6], 7, Drawn(9, 3))
        driver.begin_checkpoint(1, 7, 1)()
        (file,) = bank_files(tmp_path / "bank")
        assert "attempt" in [entry.head["kind"] for entry in scan(file)[0]]  # identifies the line of training
        copytree(tmp_path / "bank", tmp_path / "left")
        driver._loop._inference.policy_version = 1
        second = driver.collect(7)
    with driver_of(again, config, folder=tmp_path / "left", attempt=2, drawn=first.drawn, next_ordinal=7) as driver:
        driver._loop._inference.policy_version = 1
        restarted = driver.collect(7)
    assert ordinals([second]) == ordinals([restarted]) == [7, 9, 10, 11]
    assert (second.drawn, second.rounds) == (restarted.drawn, restarted.rounds)
    assert (second.groups, second.dropped) == (restarted.groups, restarted.dropped)
    asked, asked_again = ([(each.ordinal, each.key) for each in one.requests] for one in (agent, again))
    assert asked_again[0][0] == 8  # a prompt that is too long leaves no record
    assert asked_again[1:] == asked[9:]


def test_a_group_with_at_most_one_answer_left_has_no_signal() -> None:
    class LosesAlmostAll(Agent):
        async def group_rollout(self, request: GroupRolloutRequest) -> TrajectoryGroup:
            left = [trajectory([1], [2], 1.0)] if request.ordinal == 0 else []
            if request.ordinal >= 2:
                return await super().group_rollout(request)
            return TrajectoryGroup(request.ordinal, request.problem, left, {"timeout": request.group_size - len(left)})

    ((batch,),) = collect(LosesAlmostAll(), dynamic(2, 4), ranks=1)
    assert batch.dropped == {0: "no signal", 1: "no signal"}
    assert ordinals([batch]) == [2, 3]
    assert batch.failures == {"timeout": 3 + 4}, "lost answers count, though no step trains on the group"


@examples(15)
@given(
    dull=DULL,
    long=DULL,
    prompts=st.integers(1, 6),
    rounds=st.integers(1, 4),
    ranks=st.integers(1, 3),
    dynamic_=st.booleans(),
)
def test_a_prompt_that_is_too_long_is_dropped(
    dull: set[int], long: set[int], prompts: int, rounds: int, ranks: int, dynamic_: bool
) -> None:
    """Another prompt replaces it only if there is a further round."""
    config = dynamic(prompts, rounds) if dynamic_ else tiny_run(grpo={"prompts_per_step": prompts})
    (step,) = collect(Agent(dull, long=long), config, ranks)
    one = step[0]
    drawn = range(one.next_ordinal)
    assert {ordinal for ordinal, reason in dropped(step).items() if reason == "prompt too long"} == long & {*drawn}
    assert sorted([*ordinals(step), *dropped(step)]) == list(drawn)
    positions = sorted(position for batch in step for position in batch.positions)
    assert positions == [*range(len(ordinals(step)))]
    assert len(positions) == prompts or len(drawn) == prompts * (rounds if dynamic_ else 1)
