"""Registry of every metric, for console, TensorBoard and metrics.jsonl; docs/metrics.md is generated from it.

Names under time/ throughput/ system/ may differ between two runs of the same recipe; all others are reproducible.
A value that does not exist in a step is absent from its line, never NaN.

Without kl_beta and entropy_coefficient, answers whose advantage is 0 have no gradient and are not run through the
model. *Trained tokens* are those of the answers that are run: none in a group whose rewards are all equal. The loss is
the mean over all answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.rank.metrics.answer_metrics import ANSWERS
from megatron_rl.rank.metrics.learning_metrics import LEARNING
from megatron_rl.rank.metrics.machine_metrics import MACHINES
from megatron_rl.rank.metrics.metric import Metric, StepReport, ratio

if TYPE_CHECKING:
    from megatron_rl.rank.metrics.stats import EnvironmentStats, Number

TIMED = ("generate", "reward", "log-probs", "train", "offload", "refit", "wait")
"""Timeline categories that belong to a step; work between two steps has others."""

PROMPT_TOO_LONG = "prompt too long"
OVERDUE_ANSWERS = "overdue"  # reasons in `dropped_ordinals`

SUBJECTS = {"Learning": LEARNING, "Answers and prompts": ANSWERS, "Machines": MACHINES}  # as docs/metrics.md has them

STEP_METRICS: dict[str, Metric] = {name: metric for metrics in SUBJECTS.values() for name, metric in metrics.items()}


def _of_tokens(total: Number | None, stats: EnvironmentStats) -> Any:
    """Return the mean over an environment's trained tokens; None if there is no such value, or no token."""
    return None if total is None else ratio(total, stats.tokens or 0.0)


@dataclass(frozen=True, slots=True)
class EnvironmentMetric:
    """A metric environments/ID/NAME, written for each environment of a run with several."""

    meaning: str
    value: Callable[[EnvironmentStats], Any]  # value in a step, None if it does not exist there


ENVIRONMENT_METRICS: dict[str, EnvironmentMetric] = {
    "groups": EnvironmentMetric("prompts of the step from the environment", lambda its: its.groups),
    "mean_reward": EnvironmentMetric("mean reward of their answers", lambda its: ratio(its.reward, its.answers)),
    "nonzero_groups_ratio": EnvironmentMetric(
        "share of its groups whose rewards differ", lambda its: ratio(its.groups_with_signal, its.groups)
    ),
    "failed_rollouts": EnvironmentMetric("answers lost", lambda its: its.failed),
    "entropy": EnvironmentMetric(
        "mean entropy in nats of the distributions its trained tokens were drawn from",
        lambda its: _of_tokens(its.entropy, its),
    ),
    "clip_fraction": EnvironmentMetric(
        "share of its trained tokens beyond a bound of the policy loss (absent for a loss without bounds)",
        lambda its: _of_tokens(its.clipped, its),
    ),
    "kl": EnvironmentMetric(
        "mean KL estimate of its trained tokens to the initial weights (kl_beta > 0)",
        lambda its: _of_tokens(its.kl, its),
    ),
    "teacher_kl": EnvironmentMetric(
        "estimate of KL(policy || teacher) of its trained tokens that a teacher judges (distill)",
        lambda its: None if its.teacher_kl is None else ratio(its.teacher_kl, its.judged or 0.0),
    ),
}


OF_SAMPLED_ANSWERS = frozenset(
    (
        *("answers", "mean_reward", "right_ratio", "reward_std", "nonzero_groups_ratio", "truncated_ratio"),
        *("clip_fraction", "clip_fraction_low", "clip_fraction_high", "importance_ratio", "importance_ratio_max"),
        *("inference_logprob_difference", "inference_logprob_difference_max", "staleness_mean", "staleness_max"),
        *("failed_rollouts", "generation_rounds", "throughput/generated_tokens_per_s", "time/reward_s"),
    )
)
"""Metrics that supervised training does not have. Its answers are the learned parts of the rows."""

SETS = "sets/"  # prefix of metrics of a set of rows, where there are several

COMPONENTS = "reward/"  # prefix of metrics of reward components, each the mean over the answers that have the component

EVALUATION_METRICS = {
    "eval/held_out_rows/loss": Metric(
        "mean of -log p over all learned tokens of the held-out rows (data.held_out); of several sets also "
        "`eval/held_out_rows/ID/loss`",
        unit="nats per token",
        good="falls with `loss`; once it rises, more steps only memorise",
        advice="training.early_stop ends the run there and keeps the best checkpoint.",
    ),
    "eval/SET/greedy_accuracy": Metric(
        "share of greedy answers to an evaluation set that are right: whose accuracy (`environment.accuracy`) is 1 "
        "(absent without answers)",
        unit="share",
        good="rises with `right_ratio`, and stays near it on held-out problems",
    ),
    "eval/SET/pass@K": Metric(
        "unbiased pass@k of the sampled answers: probability that one of k answers to a problem is right, mean over "
        "the problems with k answers or more (`evaluation.samples`, `pass_at`; Chen et al. 2021)",
        unit="share",
        good="rises; if it falls for the largest k while pass@1 rises, the policy solves fewer problems, more surely",
        advice="A larger `sampling.temperature`, an entropy bonus or a higher clip bound keep answers different.",
    ),
    "eval/SET/avg@K": Metric("share of right answers among the K sampled ones, mean over problems", unit="share"),
    "eval/SET/maj@K": Metric(
        "share of problems whose most frequent final answer is right, where the environment compares answers; of n "
        "tied answers each counts 1/n",
        unit="share",
    ),
    "eval/SET/SHARE_low": Metric(
        "lower bound of the 95 % interval of a share of sampled answers, such as pass@8_low: Wilson's, for the "
        "number of single answers that would have the standard error over problems",
        unit="share",
    ),
    "eval/SET/SHARE_high": Metric("upper bound of that interval", unit="share"),
    "eval/SET/mean_reward": Metric("mean reward of the sampled answers, mean over problems"),
    "eval/SET/tokens": Metric("mean length of the sampled answers", unit="tokens"),
    "eval/SET/cut_off": Metric("share of sampled answers that reached `max_new_tokens`", unit="share"),
    "eval/SET/failed_rollouts": Metric(
        "answers to the set that were lost, greedy or sampled, which no share includes (absent if none is lost)",
        unit="answers",
        good="absent",
        advice="The log of rank 0 has the reasons.",
    ),
    "eval/prompt_format": Metric("format of the prompts, where the environment chooses one"),
}
"""Metrics of evaluations.jsonl."""


def metrics_of(step: StepReport) -> dict[str, Any]:
    """Return the values of a step's line in metrics.jsonl."""
    absent = OF_SAMPLED_ANSWERS if step.rows else ()
    values = {name: each.value(step) for name, each in STEP_METRICS.items() if each.value and name not in absent}
    values |= {f"{COMPONENTS}{name}": total / answers for name, (total, answers) in sorted(step.components.items())}
    values |= {f"{SETS}{id}/epoch": passes for id, passes in step.passes.items()}
    for id, stats in step.stats.environments.items():
        values |= {f"environments/{id}/{name}": metric.value(stats) for name, metric in ENVIRONMENT_METRICS.items()}
    return {name: value for name, value in values.items() if value is not None}


def check_name(name: str) -> None:
    """Raise ValueError for a metric that is not registered."""
    of_environment = name.startswith("environments/") and name.rpartition("/")[2] in ENVIRONMENT_METRICS
    if name not in STEP_METRICS and not name.startswith(("eval/", COMPONENTS, SETS)) and not of_environment:
        raise ValueError(f"metric {name!r} is not registered in megatron_rl/rank/metrics/names.py")
