"""The groups of one driver that are being rolled out, or are finished and wait for their batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from megatron_rl.agent.api import GroupedRolloutGenerator, GroupRolloutRequest
from megatron_rl.agent.keys import group_key
from megatron_rl.agent.scoring import RolloutLimits
from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.algorithms.answers import usable, with_components, with_turn_rewards
from megatron_rl.generate.engine.interface import PromptTooLong, ResumableInference
from megatron_rl.learn.rollout.bank.bank import Bank
from megatron_rl.learn.rollout.window import State
from megatron_rl.recipe.config import RunConfig

logger = logging.getLogger(__name__)

GroupTask = asyncio.Task[TrajectoryGroup | None]  # results in None if the prompt is too long


class InFlightGroups:
    """Tasks in the agents' loop, one for each ordinal of this driver. Call functions that are not coroutines only while
    no task of the loop runs, as in `AgentLoop.do`."""

    def __init__(
        self,
        agent: GroupedRolloutGenerator,
        problem: Callable[[int], Problem],
        inference: ResumableInference,
        bank: Bank,
        config: RunConfig,
    ) -> None:
        self.agent, self.bank = agent, bank
        self._problem, self._config = problem, config
        self._tasks: dict[int, GroupTask] = {}
        self._begun_after: dict[int, int] = {}  # ordinal: step whose weights were the newest when it was begun
        self._states: dict[int, State] = {}  # of finished groups
        self._recording = bank.recording(inference)
        self._writer: asyncio.Task[None] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, ordinals: range, step: int, *, waiting: bool = False) -> None:
        """Begin these ordinals. Groups scored by an earlier attempt are finished at once.

        Args:
            step: step after which the present weights are the newest.
            waiting: whether they are surplus groups of an earlier step, as for `Bank.scored`.
        """
        self._writer = self._writer or loop.create_task(self.bank.flush_regularly(self._recording))
        scored = self.bank.scored(ordinals, self._problem, waiting=waiting) if ordinals else {}
        for ordinal in ordinals:
            self._begun_after[ordinal] = step
            self._tasks[ordinal] = loop.create_task(self._group(ordinal, scored.get(ordinal)))

    async def _group(self, ordinal: int, scored: TrajectoryGroup | None) -> TrajectoryGroup | None:
        if scored is not None:
            return scored
        version = self._recording.policy_version(ordinal)
        request = GroupRolloutRequest(
            ordinal=ordinal,
            problem=self._problem(ordinal),
            group_size=self._config.grpo.group_size,
            sampling=self._config.sampling,
            key=group_key(self._config.training.seed, ordinal, 0, version),
            inference=self._recording,
            limits=RolloutLimits.of(self._config.task),
        )
        try:
            group = await self.agent.group_rollout(request)
        except PromptTooLong as error:
            logger.warning("prompt %d is dropped: %s", ordinal, error)
            return None
        id = group.problem.environment
        group = with_components(group, self._config.environment_of(id).components_read)
        if self._config.algorithms.by(id).turn_discount is not None:
            group = with_turn_rewards(group)
        group = replace(group, begun_version=version)
        self._recording.add(group)
        return group

    def states(self, ordinals: range, overdue_after: int | None) -> dict[int, State]:
        """Return the state of each begun ordinal among these. Raises an agent's exception.

        Args:
            overdue_after: unfinished groups begun with the weights after this step or an older one are overdue; None:
                no group is.
        """
        return {
            ordinal: self._state(ordinal, task, overdue_after)
            for ordinal, task in self._tasks.items()
            if ordinal in ordinals
        }

    def _state(self, ordinal: int, task: GroupTask, overdue_after: int | None) -> State:
        if not task.done():
            overdue = overdue_after is not None and self._begun_after[ordinal] <= overdue_after
            return State.OVERDUE if overdue else State.UNFINISHED
        if ordinal not in self._states:
            if (group := task.result()) is None:
                self._states[ordinal] = State.UNUSABLE
            else:
                self._states[ordinal] = State.USABLE if usable(group, self._config) else State.NO_SIGNAL
        return self._states[ordinal]

    def begun(self, ordinals: range) -> list[int]:
        """Return the ordinals among these that this driver has begun and not settled."""
        return [ordinal for ordinal in self._tasks if ordinal in ordinals]

    def unfinished(self, ordinals: range) -> list[GroupTask]:
        return [task for ordinal, task in self._tasks.items() if ordinal in ordinals and not task.done()]

    def take(self, ordinals: Iterable[int]) -> dict[int, TrajectoryGroup]:
        """Return the groups of these ordinals, as far as this driver has begun them; all of them must be finished."""
        groups = {ordinal: self._tasks[ordinal].result() for ordinal in ordinals if ordinal in self._tasks}
        return {ordinal: group for ordinal, group in groups.items() if group is not None}

    def finished(self) -> list[TrajectoryGroup]:
        """Return all groups that are finished and not settled, also after `stop`."""
        done = {each: task for each, task in self._tasks.items() if task.done() and not task.cancelled()}
        return [*self.take(each for each, task in done.items() if task.exception() is None).values()]

    def settle(self, below: int) -> int:
        """Forget all ordinals below, and cancel the unfinished ones. Return how many tokens the cancelled ones had."""
        settled = [ordinal for ordinal in self._tasks if ordinal < below]
        unfinished = {ordinal for ordinal in settled if not self._tasks[ordinal].done()}
        tokens = self._recording.tokens_of(unfinished) if unfinished else 0
        self._recording.forget(settled)
        for ordinal in settled:
            del self._begun_after[ordinal]
            self._states.pop(ordinal, None)
            self._tasks.pop(ordinal).cancel()  # without effect on a finished task
        self.bank.end_batch(self._recording, below)
        return tokens

    def flush(self) -> None:
        self.bank.flush(self._recording)

    async def stop(self) -> None:
        """Record the tokens of unfinished answers, then cancel all tasks: a cancelled request has no tokens."""
        self.flush()
        tasks: list[asyncio.Task[Any]] = [*self._tasks.values(), *filter(None, [self._writer])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
