"""The loss on held-out rows: a pass of the present weights without an update, the same in every layout."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megatron_rl.agent.trajectories import Problem, TrajectoryGroup
from megatron_rl.learn.supervised.example_driver import as_trajectory, replicas_of
from megatron_rl.learn.supervised.example_rows import RowEncoder, UnusableRow, place_of
from megatron_rl.learn.training.schedule import ModelInput
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.learn.training.training_batch import agree, training_batch, update_batch, update_part
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.config import RunConfig

logger = logging.getLogger(__name__)

ALL = "held_out_rows"  # evaluation set of all held-out rows
AT_ONCE = 512  # rows that one data-parallel replica has in memory as tokens, at most


class HeldOutRows:
    def __init__(self, rows: Mapping[str, Sequence[Problem]], tokenizer: Tokenizer, config: RunConfig) -> None:
        """rows: those of each set, by its id."""
        most = config.evaluation.prompts
        self._rows = {id: rows if most is None else rows[:most] for id, rows in rows.items()}
        self._encoder, self._tokenizer = RowEncoder(config.rows, tokenizer, config.sequence_length), tokenizer
        self._config, self._warned = config, False

    def losses(self, trainer: Trainer) -> dict[str, float]:
        """Return the mean of -log p over all learned tokens of the held-out rows, and over those of each of several
        sets, as metrics of an evaluation: `eval/held_out_rows/loss` and `eval/held_out_rows/ID/loss`. Collective.

        Raises LeaveAgreed if a rank is asked to leave.
        """
        sums = torch.zeros(len(self._rows), 2, dtype=torch.float64)  # -log p of all tokens, and their number
        groups, dropped = trainer.groups, 0
        for number, rows in enumerate(self._rows.values()):
            each = AT_ONCE * groups.data.size()
            for start in range(0, len(rows), each):
                own = [*self._own(rows[start : start + each], start, groups.data.rank(), groups.data.size())]
                dropped += sum(one is None for one in own)
                scores = score(trainer, [one for one in own if one is not None])
                if groups.reports:
                    sums[number] += torch.stack((-scores.double().sum(), torch.tensor(float(len(scores)))))
                trainer.safe_points.agree()
        if dropped and not self._warned:
            self._warned = True
            logger.warning("%d held-out rows cannot be read as tokens, and have no part in the loss on them", dropped)
        of_sets = trainer.groups.control.reduce(sums)
        found = {ALL: of_sets.sum(0)}
        if [*self._rows] != [""]:
            found |= {f"{ALL}/{id}": its for id, its in zip(self._rows, of_sets, strict=True)}
        return {f"eval/{name}/loss": float(total / tokens) for name, (total, tokens) in found.items() if tokens}

    def _own(
        self, rows: Sequence[Problem], first: int, replica: int, replicas: int
    ) -> Iterator[TrajectoryGroup | None]:
        """Yield this replica's part of some rows; None for a row that cannot be used. first: number of the first."""
        for number, (row, of) in enumerate(zip(rows, replicas_of(rows, replicas), strict=True), first):
            if of != replica:
                continue
            try:
                example = self._encoder.example(row)
            except UnusableRow as error:
                logger.debug("held-out %s: %s", place_of(row, number), error)
                yield None
                continue
            yield TrajectoryGroup(number, row, [as_trajectory(example, self._tokenizer)], {})


def score(trainer: Trainer, groups: Sequence[TrajectoryGroup]) -> Tensor:
    """[learned tokens] log-probs of rows under the present weights, on the CPU, on ranks of the last pipeline stage;
    incomplete where a rank is asked to leave. Collective; each replica has its own rows, perhaps none."""
    config, platform = trainer.config, trainer.platform
    batch = training_batch(groups, trainer.objective.credit(groups), config, trainer.policy_version, platform.device)
    part = update_part(batch, range(len(batch.sequences)), config, platform.kernels)
    (agreed,) = agree([part], trainer.groups)
    microbatches = update_batch(part, agreed).microbatches
    inputs = [ModelInput.of(trainer.policy, micro, trainer.groups.context) for micro in microbatches]
    return trainer.score(trainer.policy, batch, inputs).cpu()
