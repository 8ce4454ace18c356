"""One step's record: what the ranks counted, reduced and turned into the numbers of its lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_rl.contract.attempt_records import TimelineLine
from megatron_rl.errors import ConfigurationError
from megatron_rl.metrics.names import PROMPT_TOO_LONG, TIMED, Step, metrics_of
from megatron_rl.metrics.stats import StepStats
from megatron_rl.metrics.tally import Tally
from megatron_rl.metrics.timeline import Timeline


class AllAnswersLost(RuntimeError):
    """Nothing of a step could be scored: the environment is broken, and going on would train on nothing."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one rank has to say of a step. All but `stats`, `dropped` and `failures` is the same on every rank."""

    step: int
    stats: StepStats
    generation_rounds: int
    first_ordinal: int
    next_ordinal: int
    policy_version: int
    dropped: Mapping[int, str]
    """Ordinals of this rank that were settled without training, and why."""
    failures: Mapping[str, int]
    """Answers of this rank that were lost, by reason."""

    def lines(self, timeline: Timeline, control: dist.ProcessGroup) -> tuple[dict[str, Any], TimelineLine]:
        """The step's lines for metrics.jsonl and for the attempt's timeline, the same on every rank. Collective.

        Raises AllAnswersLost, or ConfigurationError where all prompts of the step were too long.
        """
        tally = Tally()
        self.stats.put(tally)
        timeline.tally(tally)
        total = tally.reduce(control)
        stats = self.stats.reduced(total)
        failures, dropped = self._of_all_ranks(control) if stats.batch.failed or stats.batch.dropped else ({}, {})
        if not stats.batch.answers and {*dropped.values()} == {PROMPT_TOO_LONG}:
            raise ConfigurationError(
                f"the prompts {self.first_ordinal} to {self.next_ordinal - 1}, all of step {self.step}, are too long: "
                "with sampling.max_new_tokens they exceed training.sequence_length or model.max_position_embeddings"
            )
        if not stats.batch.answers:
            raise AllAnswersLost(f"no answer of step {self.step} could be scored: {failures}")
        ranks = dist.get_world_size(control)
        line = timeline.line(total, ranks, self.step)
        step = Step(
            stats=stats,
            generation_rounds=self.generation_rounds,
            first_ordinal=self.first_ordinal,
            next_ordinal=self.next_ordinal,
            policy_version=self.policy_version,
            dropped=dropped,
            failures=failures,
            ranks=ranks,
            seconds={name: line.seconds.get(name, 0.0) / ranks for name in TIMED},
        )
        return metrics_of(step), line

    def _of_all_ranks(self, control: dist.ProcessGroup) -> tuple[dict[str, int], dict[int, str]]:
        """Failures and dropped ordinals of all ranks. Collective; called only when there are any."""
        gathered: list[Any] = [None] * dist.get_world_size(control)
        dist.all_gather_object(gathered, (dict(self.failures), dict(self.dropped)), group=control)
        failures: Counter[str] = Counter()
        dropped: dict[int, str] = {}
        for of_rank in gathered:
            failures.update(of_rank[0])
            dropped |= of_rank[1]
        return dict(sorted(failures.items())), dict(sorted(dropped.items()))
