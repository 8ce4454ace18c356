"""The batches of supervised training: the rows of each step, as groups that the trainer treats like answers.

Every ordinal of the mix is a row. The batch of step s is the ordinals [s * examples_per_step, (s + 1) *
examples_per_step), whatever the layout, so each pass trains on every row once. Where the sets have epochs, the last
step has the rows that are left. All ranks know all rows, so the ranks agree on the batch without communication.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import groupby

from megatron_rl.agent.api import Environment
from megatron_rl.agent.trajectories import UNSAMPLED, Problem, Trajectory, TrajectoryGroup
from megatron_rl.algorithms.balance import balance
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow, place_of
from megatron_rl.learn.supervised.row_mix import RowMix
from megatron_rl.model.chat.messages import Example
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.rank.groups import Groups
from megatron_rl.recipe.config import RunConfig

logger = logging.getLogger(__name__)

BYTES_PER_TOKEN = 4  # rough size of a token of text, to judge the work of a row before it is turned into tokens


class ExampleDriver:
    """Makes this rank's part of every batch. Has the methods of `rollout.driver.RolloutDriver` that a run calls."""

    def __init__(
        self,
        rows: RowMix,
        tokenizer: Tokenizer,
        config: RunConfig,
        groups: Groups,
        environment: Environment | None,
        loop: AgentLoop | None,
    ) -> None:
        """
        rows: in their order.
        environment, loop: of the run's evaluations, if it has any.
        """
        self._rows = rows
        self._wanted, self._groups = config.groups_per_step, groups
        self._environment, self._loop = environment, loop
        self._tokenizer = tokenizer
        self._encoder = RowEncoder(config.rows, tokenizer, config.sequence_length)
        self._dropped: Counter[str] = Counter()

    def collect(self, first_ordinal: int) -> RolloutBatch:
        """Return this rank's rows of the next step. Rows that cannot be trained on are dropped, not replaced."""
        end = first_ordinal + self._wanted
        ordinals = range(first_ordinal, end if self._rows.total is None else min(end, self._rows.total))
        rows = [self._rows.problem(ordinal) for ordinal in ordinals]
        replica_of = replicas_of(rows, self._groups.data.size())
        found: list[TrajectoryGroup] = []
        positions: list[int] = []
        dropped: dict[int, str] = {}
        for position, (ordinal, row, replica) in enumerate(zip(ordinals, rows, replica_of, strict=True)):
            if replica != self._groups.data.rank():
                continue
            try:
                example = self._encoder.example(row)
            except UnusableRow as error:
                dropped[ordinal] = str(error)
                self._warn(place_of(row, ordinal), str(error))
                continue
            found.append(TrajectoryGroup(ordinal, row, [as_trajectory(example, self._tokenizer)], {}))
            positions.append(position)
        return RolloutBatch(
            groups=found,
            positions=positions,
            first_ordinal=ordinals.start,
            next_ordinal=ordinals.stop,
            dropped=dropped if self._groups.reports else {},
            firsts=_firsts(rows),
        )

    def _warn(self, where: str, reason: str) -> None:
        """Report a dropped row: the 1st, 10th, 100th ... with its reason."""
        self._dropped[reason] += 1
        if re.fullmatch("10*", count := str(self._dropped[reason])):
            logger.warning("%s is dropped: %s (rows dropped for this reason so far: %s)", where, reason, count)

    def begin_checkpoint(self, step: int, next_ordinal: int, policy_version: int) -> Callable[[], None]:
        """Return at once: a checkpoint's cursor says which rows follow, so nothing else needs to be on disk."""
        return lambda: None

    def end_checkpoint(self, step: int) -> None:
        """No-op: nothing is kept between steps."""

    def stop(self) -> None:
        """End the evaluations. Collective over the ranks that generate together."""
        if self._loop is not None and self._environment is not None:
            self._loop.advance(self._environment.close)
            self._loop.pause()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()


def _firsts(rows: Sequence[Problem]) -> frozenset[int]:
    """Return the places of the first row of each set; none for a single set."""
    places = {row.environment: place for place, row in reversed([*enumerate(rows)])}
    return frozenset(places.values() if "" not in places else ())


def replicas_of(rows: Sequence[Problem], replicas: int) -> list[int]:
    """Return the replica that reads each row, so that all have about the same work."""
    costs = [_cost(row) for row in rows]
    return balance(costs, [position * replicas // len(rows) for position in range(len(rows))], replicas)


def _cost(row: Problem) -> float:
    """Rough work of a row: its tokens, and attention between them."""
    tokens = len(row.prompt) / BYTES_PER_TOKEN
    return tokens + tokens * tokens / 10_000


def as_trajectory(example: Example, tokenizer: Tokenizer) -> Trajectory:
    """The row as the trainer reads it. No policy sampled it, so its log-probs and versions mean nothing."""
    tokens, mask = example
    turns, place = [], 0
    for learned, run in groupby(mask):
        length = len([*run])
        if learned:
            turns.append(range(place, place + length))
        place += length
    return Trajectory(
        tokens=tokens,
        loss_mask=mask,
        logprobs=[0.0] * len(tokens),
        versions=[UNSAMPLED] * len(tokens),
        turns=turns,
        text=tokenizer.decode(tokens, special=True),
        reward=0.0,
        finish_reason="stop",
    )
