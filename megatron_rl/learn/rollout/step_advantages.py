"""Advantages that depend on all answers of a step, whose groups different drivers have rolled out.

    every driver -> every rank    table of its answers: a few numbers each, see `ScoredAnswers`
    every rank                    joins them in the order of the groups, and estimates all advantages

So the result depends on the step alone, not on how many drivers share it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import TrajectoryGroup
from megatron_rl.algorithms.answers import ScoredAnswers, algorithms_of, fp64, scored_answers
from megatron_rl.algorithms.credit import estimates
from megatron_rl.rank.control import Control
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.grpo import GrpoConfig


@dataclass(frozen=True, slots=True)
class Table:
    positions: list[int]  # [groups] position of each group in the global batch
    algorithms: list[int]  # [groups] see `algorithms_of`
    answers: ScoredAnswers

    @classmethod
    def of(cls, finished: Mapping[int, TrajectoryGroup], config: RunConfig) -> Table:
        """finished: groups by position."""
        groups = [*finished.values()]
        return cls([*finished], algorithms_of(groups, config).tolist(), scored_answers(groups, config))

    def encoded(self) -> bytes:
        answers = asdict(self.answers.each(Tensor.tolist))
        return json.dumps({"positions": self.positions, "algorithms": self.algorithms, **answers}).encode()

    @classmethod
    def decoded(cls, message: bytes) -> Table:
        content = json.loads(message)
        return cls(
            content["positions"],
            content["algorithms"],
            ScoredAnswers(
                group=torch.tensor(content["group"], dtype=torch.long),
                num_groups=content["num_groups"],
                scored=fp64(content["scored"]),
                rewards=fp64(content["rewards"]),
                accuracy=fp64(content["accuracy"]),
                tokens=torch.tensor(content["tokens"], dtype=torch.long),
                components={name: fp64(values) for name, values in content["components"].items()},
                component_weights={name: fp64(values) for name, values in content["component_weights"].items()},
            ),
        )


def step_advantages(finished: Mapping[int, TrajectoryGroup], config: RunConfig, control: Control) -> dict[int, Tensor]:
    """Return the advantages of all groups of the step, by position: [trajectories of the group] fp32. Collective.

    finished: groups of this rank's driver, by position in the global batch; empty on a rank that does not drive.
    """
    own = Table.of(finished, config)
    parts = [Table.decoded(message) for message in control.gather(own.encoded())]
    return of_tables(parts, config.algorithms.each)


def of_tables(parts: Sequence[Table], algorithms: Sequence[GrpoConfig]) -> dict[int, Tensor]:
    positions = [position for part in parts for position in part.positions]
    of_groups = [algorithm for part in parts for algorithm in part.algorithms]
    order = sorted(range(len(positions)), key=positions.__getitem__)
    whole = in_order(joined_answers([part.answers for part in parts]), order)
    advantages = estimates(whole, torch.tensor(of_groups, dtype=torch.long)[order], algorithms)
    sizes = torch.bincount(whole.group, minlength=len(positions)).tolist()
    return dict(zip((positions[number] for number in order), advantages.split(sizes), strict=True))


def joined_answers(parts: Sequence[ScoredAnswers]) -> ScoredAnswers:
    """Return one table of several; a component that some of them lack is NaN there, and its weight 0."""
    firsts = [0]
    for part in parts:
        firsts.append(firsts[-1] + part.num_groups)

    def named(of: Callable[[ScoredAnswers], Mapping[str, Tensor]], absent: float) -> dict[str, Tensor]:
        names = sorted({name for part in parts for name in of(part)})
        return {
            name: torch.cat([of(part).get(name, torch.full_like(part.rewards, absent)) for part in parts])
            for name in names
        }

    return ScoredAnswers(
        group=torch.cat([part.group + first for part, first in zip(parts, firsts, strict=False)]),
        num_groups=firsts[-1],
        scored=torch.cat([part.scored for part in parts]),
        rewards=torch.cat([part.rewards for part in parts]),
        accuracy=torch.cat([part.accuracy for part in parts]),
        tokens=torch.cat([part.tokens for part in parts]),
        components=named(lambda part: part.components, math.nan),
        component_weights=named(lambda part: part.component_weights, 0.0),
    )


def in_order(answers: ScoredAnswers, order: Sequence[int]) -> ScoredAnswers:
    """Return the table with its groups in another order. order: [groups] present index of each group."""
    place = torch.empty(answers.num_groups, dtype=torch.long)
    place[torch.tensor(order, dtype=torch.long)] = torch.arange(answers.num_groups)
    group = place[answers.group]
    rows = group.argsort(stable=True)
    return replace(answers.each(lambda column: column[rows]), group=group[rows])


def of_positions(advantages: Mapping[int, Tensor] | None, positions: Iterable[int]) -> Tensor | None:
    """Return the advantages of some groups, [trajectories]; None if there are none."""
    return None if advantages is None else torch.cat([torch.zeros(0), *(advantages[each] for each in positions)])
