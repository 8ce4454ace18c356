"""State of one rank's share of a run, and its progress as a checkpoint has it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.agent.api import Environment
from megatron_rl.agent.problem_digest import ProblemDigest
from megatron_rl.checkpoint.save import Checkpointer
from megatron_rl.contract.paths import RunDir
from megatron_rl.generate.engine.interface import ResumableInference
from megatron_rl.generate.refit.rank_refit import Refit
from megatron_rl.learn.rollout.agent_loop import AgentLoop
from megatron_rl.learn.rollout.batch import RolloutBatch
from megatron_rl.learn.rollout.curriculum import CurriculumState
from megatron_rl.learn.rollout.evaluation import evaluate
from megatron_rl.learn.rollout.evaluation_beside import EvaluationBeside
from megatron_rl.learn.rollout.record import RolloutRecord
from megatron_rl.learn.rollout.window import Drawn
from megatron_rl.learn.supervised.early_stop import BestLoss, why_over
from megatron_rl.learn.supervised.held_out import HeldOutRows
from megatron_rl.learn.training.trainer import Trainer
from megatron_rl.rank.control import Control
from megatron_rl.rank.groups import Groups
from megatron_rl.rank.here import Here
from megatron_rl.rank.metrics.writer import Writer
from megatron_rl.rank.profiler import StepProfiler
from megatron_rl.rank.safe_points import SafePoints
from megatron_rl.recipe.adapters import adapter_record, check_base
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.run.models import Models
from megatron_rl.run.problems import HELD_OUT, Material, begun_fork

if TYPE_CHECKING:
    from megatron_rl.generate.refit.kept_version import VersionKeeper  # it needs an HTTP client

logger = logging.getLogger("megatron_rl")


@dataclass(frozen=True, slots=True)
class Counters:
    """Progress of a run, as the numbers in a checkpoint."""

    step: int = 0  # last finished step
    next_ordinal: int = 0
    drawn_below: int = 0  # `rollout.window.Drawn.below`
    passed_over: int = 0  # `rollout.window.Drawn.passed_over`
    evaluated: int = -1  # step of the last evaluation; -1: none
    evaluating: int | None = None
    """Step of an evaluation that is answered beside training and not recorded yet, `evaluated`; None: none is."""
    policy_version: int = 0
    nonfinite_in_a_row: int = 0
    initial_weights: str | None = None
    """Digest of the checkpoint (`model.checkpoint`) or files (`model.huggingface`) that the run started from, or a
    checksum of the weights that adapters belong to."""
    adapters: Mapping[str, Any] | None = None
    """`checkpoint.adapters.AdapterRecord`; None if the checkpoint holds all weights."""
    problems: Mapping[str, ProblemDigest] = field(default_factory=dict)
    """Digests of the training problems, by environment; empty in old checkpoints, which do not record them."""
    curriculum: Mapping[str, Any] | None = None
    """`rollout.curriculum.CurriculumState` as JSON; None without a curriculum."""
    best: Mapping[str, Any] | None = None
    """`supervised.early_stop.BestLoss` as JSON, whose checkpoint is kept; None without training.early_stop."""

    @property
    def drawn(self) -> Drawn:
        return Drawn(self.drawn_below, self.passed_over)

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Counters:
        """Read the counters of a checkpoint. Raises ConfigurationError for counters of a later version of mrl."""
        if unknown := meta.keys() - {known.name for known in fields(cls)}:
            raise ConfigurationError(
                f"the newest checkpoint has {', '.join(sorted(unknown))}, unknown to this version of mrl: continue "
                "with the version that wrote it"
            )
        problems = {name: ProblemDigest(**its) for name, its in meta.get("problems", {}).items()}
        return cls(**{**meta, "problems": problems})


def restore(
    checkpointer: Checkpointer, models: Models, initial_weights: str | None, safe_points: SafePoints
) -> Counters:
    """Restore the models from the newest good checkpoint, if any, and return the run's counters. Collective.

    initial_weights: digest of the present `model.checkpoint` or `model.huggingface`, if read.

    Raises ConfigurationError if the run started from other weights: the KL penalty would pull to the wrong ones, and
    adapters would be added to them.
    """
    safe_points.activity.enter("loading the checkpoint", 0)
    with safe_points.timeline.phase("load"):
        checkpoint = checkpointer.restore(models.restore)
    if checkpoint is None:
        return Counters(initial_weights=initial_weights)
    counters = Counters.of(checkpoint.manifest.meta)
    if initial_weights is not None and counters.adapters is not None:
        check_base(checkpoint.folder, checkpoint.manifest.meta, initial_weights)
    elif initial_weights is not None and initial_weights != counters.initial_weights:
        raise ConfigurationError(
            "model.checkpoint (or huggingface) has changed since this run started, and the KL penalty (grpo.kl_beta) "
            "needs the original weights: restore them, or start another run"
        )
    logger.info("resuming after step %d", counters.step)
    return counters


def best_so_far(
    counters: Counters, problems: Mapping[str, ProblemDigest], run_dir: RunDir, control: Control
) -> BestLoss | None:
    """Return the best evaluation up to the checkpoint; None without one. A fork begins with that of its source only if
    it begins with its weights, as other checkpoints stay in the source, and has the same held-out rows. Collective."""
    if counters.best is None:
        return None
    best = BestLoss(**counters.best)
    if not control.share(control.rank == 0 and begun_fork(run_dir, counters.step) is not None):
        return best
    before, now = (
        {name: digest for name, digest in its.items() if name.endswith(HELD_OUT)}
        for its in (counters.problems, problems)
    )
    return best if best.step == counters.step and before == now else None


@dataclass(frozen=True, slots=True)
class Generation:
    engine: ResumableInference  # engine this rank's driver queries, or its part of the engine on a rank that follows
    refit: Refit
    loop: AgentLoop
    end: Callable[[], None] = lambda: None  # called after the last request
    metrics: Callable[[], dict[str, float]] = dict  # returns the metrics of the newest step, on the first rank
    keeper: VersionKeeper | None = None  # of `evaluation.replicas`


class NoRefit:
    """Implements `Refit` in a run that samples nothing."""

    moved_bytes = 0

    def begin_training(self) -> None:
        """No-op: nothing has the device."""

    def publish(self, policy_version: int) -> None:
        """No-op: nobody needs the weights."""

    def finish(self) -> None:
        """No-op, as `publish` is."""


class Driver(Protocol):
    """Source of the batches that a run trains on: see `RolloutDriver`, and `ExampleDriver` for rows of data."""

    def collect(self, first_ordinal: int) -> RolloutBatch: ...
    def begin_checkpoint(self, step: int, next_ordinal: int, policy_version: int) -> Callable[[], None]: ...
    def end_checkpoint(self, step: int) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Run:
    """One rank's share of a run. Progress is in `step`, `next_ordinal`, `saved` and `evaluated`."""

    config: RunConfig
    here: Here
    material: Material
    models: Models
    initial_weights: str | None
    trainer: Trainer
    generation: Generation | None  # none if nothing is sampled
    driver: Driver
    held_out: HeldOutRows | None  # none if no rows are held out
    checkpointer: Checkpointer
    writer: Writer
    record: RolloutRecord
    profiler: StepProfiler
    step: int
    next_ordinal: int
    drawn: Drawn
    curriculum: CurriculumState | None
    """State of the curriculum after the last finished step; None without a curriculum, or before its first step."""
    saved: int  # last step whose checkpoint was begun, or from which the run was restored
    evaluated: int  # step of the last evaluation, begun or recorded; -1: none
    beside: EvaluationBeside | None
    """Evaluation that replicas answer beside training; None if training waits for evaluations."""
    best: BestLoss | None  # best evaluation of a run that may stop early; None: none yet

    @property
    def groups(self) -> Groups:
        return self.here.groups

    @property
    def safe_points(self) -> SafePoints:
        return self.here.safe_points

    @property
    def environment(self) -> Environment | None:
        """None if nothing is sampled."""
        return self.material.lesson.environment

    @property
    def engine(self) -> ResumableInference:
        """Engine that the driver queries. Only if the run generates."""
        assert self.generation is not None
        return self.generation.engine

    @property
    def refit(self) -> Refit:
        return NoRefit() if self.generation is None else self.generation.refit

    def counters(self) -> dict[str, Any]:
        return asdict(
            Counters(
                step=self.step,
                next_ordinal=self.next_ordinal,
                drawn_below=self.drawn.below,
                passed_over=self.drawn.passed_over,
                evaluated=self.evaluated,
                evaluating=self.beside.step if self.beside else None,
                policy_version=self.trainer.policy_version,
                nonfinite_in_a_row=self.trainer.nonfinite_in_a_row,
                initial_weights=self.initial_weights,
                adapters=adapter_record(self.config.model),
                problems=self.material.digests,
                curriculum=None if self.curriculum is None else self.curriculum.to_json(),
                best=None if self.best is None else self.best._asdict(),
            )
        )

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.environment is not None or self.held_out is not None

    @property
    def why_over(self) -> str:
        """Reason why the run ends before its last step; empty if it does not."""
        return why_over(self.best, self.config.training.early_stop)

    def evaluate(self) -> dict[str, Any]:
        """Return the loss on held-out rows and the scores on the evaluation sets, as far as they are due, and the
        format of the prompts. Collective."""
        metrics: dict[str, Any] = {}
        if self.held_out is not None and self.config.evaluation.due(self.step, self.config.training.steps):
            metrics |= self.held_out.losses(self.trainer)
        if self.environment is None or self.generation is None:
            return metrics
        loop = self.generation.loop
        metrics |= evaluate(self.environment, self.engine, self.config, self.groups.control, loop, self.step)
        return self.with_format(metrics)

    def with_format(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Return the metrics of an evaluation with the format of its prompts."""
        prompt_format = self.environment.prompt_format if self.environment else ""
        return {**metrics, **({"eval/prompt_format": prompt_format} if prompt_format else {})}
