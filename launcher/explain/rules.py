"""The rules. Each is a pure function of a Record, and has a section of its name in docs/troubleshooting.md.

A rule speaks only of what the record shows: the evidence has the numbers, and what to try names keys of the recipe. The
warnings that a run shows while it trains (contract/learning.py) are findings here too. The rules of this file need more
than the newest steps: the recipe, the evaluations, or the beginning of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from launcher.explain import lesson_rules
from launcher.explain.record import Record
from launcher.explain.trend import fall_of, rise_of
from megatron_rl.contract.learning import SOLVED, TREND_STEPS, WINDOW, number
from megatron_rl.contract.text import printable

ENTROPY_LEFT = 0.1
"""Share of the first steps' entropy below which it has collapsed, unless the problems are solved: a policy that solves
its problems is certain of its answers for a good reason."""
SIGNAL_LEFT = 0.5
"""Share of the first steps' groups with signal that is left where a collapse does harm."""
CLIPPED = {"gspo": 0.8, "gspo_token": 0.8}
"""Share of the trained tokens beyond the bounds of a policy loss that is too much, where it is not CLIPPED_USUALLY.
Whole sequences are clipped by gspo: 10% to 65% of the tokens in runs that learn."""
CLIPPED_USUALLY = 0.3
"""The same for the other losses. Runs of `clip` with four updates a step that learn have up to 20%."""
DIFFERENCE = 0.05
"""Mean difference in nats between the log-probs of the trainer and of the engine. In bf16 0.005 to 0.02 are usual,
in fp32 1e-6."""
STALENESS = 4.0
"""Mean age of answers in optimizer steps. Peers report losses of accuracy beyond about this age without correction."""
BF16_STEP = 2.0**-9
"""Largest relative change of a weight that rounding to bf16 can remove."""
TYPICAL_WEIGHT = 0.02
"""Magnitude of a weight of a language model, the usual standard deviation of its initialisation."""
LONG_ENOUGH = 50
"""Steps after which a reward that is no higher than at the start is a finding, and at least half of those of the
recipe: many runs that learn begin with a flat stretch, or a dip."""
LOST = 0.3
"""Fall of the mean reward from its best window, as a share of the rise until then, that matters."""
GAP = 0.25
"""Accuracy on trained problems less that on held-out ones where answers are memorised."""
FALLEN = 0.05
"""Fall of the accuracy on held-out problems from its best value that goes with it."""


class Finding(NamedTuple):
    """Something in the record that hinders learning, or may."""

    rule: str
    seen: str
    """Evidence: one sentence with numbers."""
    advice: str
    """One or more sentences that name keys of the recipe."""
    since: int | None = None
    """First step, if the rule knows it."""


class Rule(NamedTuple):
    name: str
    find: Callable[[Record], str | None]
    """Evidence; None if the rule does not apply."""
    advice: str


def _reward_not_above_start(record: Record) -> str | None:
    rewards, right = record.series("mean_reward"), record.last("right_ratio")
    planned = record.key("training.steps") or 0
    if not max(LONG_ENOUGH, planned // 2) <= len(rewards) < TREND_STEPS or (right is not None and right >= SOLVED):
        return None  # from TREND_STEPS on the warning reward-not-rising says it
    rise = rise_of(rewards)
    if rise.significant:
        return None
    return (
        f"The mean reward of the last {rise.quarter} of {len(rewards)} steps is {rise.now:.3g}, and was "
        f"{rise.before:.3g} in the first {rise.quarter}; the standard error of the difference is {rise.error:.2g}. In "
        f"between it was {min(rewards):.3g} to {max(rewards):.3g}"
    )


def _reward_fell(record: Record) -> str | None:
    fall = fall_of(record.series("mean_reward"))
    if fall is None or any(one.name == "reward-collapse" for one in record.warnings):
        return None
    if fall.best - fall.last <= LOST * (fall.best - fall.first):
        return None
    return (
        f"The mean reward of {fall.window} steps fell from {fall.best:.3g}, its best, reached at step {fall.reached}, "
        f"to {fall.last:.3g}"
    )


def _signal_fading(record: Record) -> str | None:
    before, now = record.first("nonzero_groups_ratio"), record.last("nonzero_groups_ratio")
    right = record.last("right_ratio")
    if before is None or now is None or right is None or right >= SOLVED or now >= min(before / 3, (1 - right) / 2):
        return None
    return (
        f"Groups whose answers differ in reward fell from {before:.0%} to {now:.0%}, while {1 - right:.0%} of the "
        "answers are still wrong: most problems are now always wrong, and teach nothing"
    )


def _entropy_collapse(record: Record) -> str | None:
    before, now, right = record.first("entropy"), record.last("entropy"), record.last("right_ratio")
    signal_before, signal = record.first("nonzero_groups_ratio"), record.last("nonzero_groups_ratio")
    if before is None or now is None or right is None or signal_before is None or signal is None:
        return None
    if now >= ENTROPY_LEFT * before or right >= SOLVED or signal >= SIGNAL_LEFT * signal_before:
        return None
    return (
        f"The entropy fell from {before:.3g} to {now:.3g} nats a token, and groups with signal from "
        f"{signal_before:.0%} to {signal:.0%}, while {right:.0%} of the answers are right: the policy gives the same "
        "answers again and again"
    )


def _clipped(record: Record) -> str | None:
    share, loss = record.last("clip_fraction"), record.key("grpo.policy_loss")
    limit = CLIPPED.get(loss, CLIPPED_USUALLY)
    if share is None or share <= limit:
        return None
    return (
        f"The bounds of the policy loss ({loss}) removed the gradient of {share:.0%} of the trained tokens in the last "
        f"{WINDOW} steps; runs that learn stay below {limit:.0%}"
    )


def _engine_mismatch(record: Record) -> str | None:
    difference, age = record.last("inference_logprob_difference"), record.last("staleness_mean")
    if difference is None or age is None or difference <= DIFFERENCE or age > 0:  # older weights differ for good reason
        return None
    return (
        f"The engine that samples and the trainer differ by {difference:.3g} nats a token in the last {WINDOW} steps, "
        f"although they have the same weights; in bf16 {DIFFERENCE:g} is much"
    )


def _stale(record: Record) -> str | None:
    age = record.last("staleness_mean")
    if age is None or age < STALENESS or record.key("grpo.importance") or record.key("grpo.rejection"):
        return None
    return (
        f"The answers of the last {WINDOW} steps were sampled {age:.1f} optimizer steps before they were trained on, "
        "and grpo.importance corrects for nothing"
    )


def _learning_rate_below_bf16(record: Record) -> str | None:
    rates = record.series("learning_rate")
    if record.key("model.dtype") != "bf16" or len(rates) < WINDOW or not any(rates):
        return None
    updates = max(1.0, (number(record.lines[-1], "policy_version") or 0) / len(record.lines))
    steps = record.key("training.steps") or len(rates)
    moved = sum(rates) * updates + rates[-1] * updates * max(0, steps - len(rates))
    if moved >= BF16_STEP * TYPICAL_WEIGHT:
        return None
    return (
        f"All {steps} steps together move a weight by {moved:.2g} at most (Adam: about the learning rate an update). "
        f"A weight of {TYPICAL_WEIGHT:g} in bf16 changes only from {BF16_STEP * TYPICAL_WEIGHT:.2g} on, so the policy "
        "that answers stays the same"
    )


def _memorised(record: Record) -> str | None:
    trained, held_out = _accuracies(record, "trained"), _accuracies(record, "held_out")
    if len(held_out) < 2 or not trained:
        return None
    gap, best = trained[-1] - held_out[-1], max(held_out)
    if gap <= GAP or best - held_out[-1] <= FALLEN:
        return None
    return (
        f"Greedy accuracy is {trained[-1]:.2f} on trained problems and {held_out[-1]:.2f} on held-out ones, where it "
        f"was {best:.2f}: the policy memorises"
    )


def _accuracies(record: Record, name: str) -> list[float]:
    """Greedy accuracies of the evaluation sets whose name ends with `name`, mean over the sets, by evaluation."""
    found = []
    for line in record.evaluations:
        values = [number(line, key) for key in line.values if key.endswith(f"{name}/greedy_accuracy")]
        known = [value for value in values if value is not None]
        if known:
            found.append(sum(known) / len(known))
    return found


def _component_never_earned(record: Record) -> str | None:
    names = sorted({name for line in record.lines[-WINDOW:] for name in line.values if name.startswith("reward/")})
    never = [
        name.removeprefix("reward/") for name in names if len(record.lines) >= WINDOW and not any(record.series(name))
    ]
    if not never:
        return None
    those = f"{'component' if len(never) == 1 else 'components'} {printable(', '.join(never))}"
    return f"No answer of {len(record.lines)} steps has earned anything of the {those} of the reward"


def _slow_rank(record: Record) -> str | None:
    text = "; ".join(map(str, record.slow_ranks))
    return text[:1].upper() + text[1:] or None


RULES = (
    Rule(
        "reward-not-above-start",
        _reward_not_above_start,
        "Lower optimizer.learning_rate if the reward fell in between, else raise it. Take fewer updates a step (a "
        "larger grpo.global_batch), more answers a problem (grpo.group_size) or easier problems.",
    ),
    Rule(
        "reward-fell",
        _reward_fell,
        "Continue from before the fall with a lower optimizer.learning_rate: mrl fork RUN@STEP "
        "optimizer.learning_rate=VALUE. grpo.kl_beta and fewer updates a step hold a policy back.",
    ),
    Rule(
        "signal-fading",
        _signal_fading,
        "Train on problems of all degrees of difficulty (curriculum, grpo.dynamic_sampling), with a larger "
        "grpo.group_size, or with a lower optimizer.learning_rate.",
    ),
    Rule(
        "entropy-collapse",
        _entropy_collapse,
        "Set grpo.eps_high above grpo.eps_low (0.28 as DAPO does), add grpo.entropy_coefficient (0.001), lower "
        "optimizer.learning_rate, or train on harder problems (curriculum).",
    ),
    Rule(
        "clipped",
        _clipped,
        "Lower optimizer.learning_rate, or take fewer updates a step: a larger grpo.global_batch or fewer "
        "grpo.iterations.",
    ),
    Rule(
        "engine-mismatch",
        _engine_mismatch,
        "Look for sampling fields that the engine takes from elsewhere, a quantised engine and a chat template of its "
        "own. grpo.importance with upper: 2.0 corrects for what remains.",
    ),
    Rule(
        "stale",
        _stale,
        "Set grpo.importance.upper to 2.0, lower async.max_lag, or give generation more GPUs (mrl plan).",
    ),
    Rule(
        "learning-rate-below-bf16",
        _learning_rate_below_bf16,
        "Raise optimizer.learning_rate; 1e-6 is usual for all weights, 1e-5 to 1e-4 for adapters (model.lora).",
    ),
    Rule(
        "memorised",
        _memorised,
        "Stop earlier (evaluation.every shows when), use more problems, or add grpo.kl_beta.",
    ),
    Rule(
        "component-never-earned",
        _component_never_earned,
        "Look at answers (mrl rollouts RUN): the prompt may not say what the component wants, or its function never "
        "finds it. A few worked examples teach a format (training.objective: supervised).",
    ),
    Rule(
        "format-missing",
        lesson_rules.format_missing,
        "Read some (mrl rollouts RUN --reward 0). Say the format in the prompt with an example, reward it alone with a "
        "small value (format_reward of the mathematics environments, a component of your own), or teach it first with "
        "worked examples (training.objective: supervised). A chat template that ends the answer too early looks alike.",
    ),
    Rule(
        "calls-do-not-parse",
        lesson_rules.calls_do_not_parse,
        "Read some (mrl rollouts RUN). The model may call tools in another format than its chat template has: choose "
        "the model's own template, or teach calls first with worked examples (training.objective: supervised).",
    ),
    Rule(
        "prompts-equal",
        lesson_rules.prompts_equal,
        "Look at the prompts (mrl rows RECIPE): the column of the question may be another (environment.args, data), or "
        "the chat template may leave the message out.",
    ),
    Rule(
        "prompts-empty",
        lesson_rules.prompts_empty,
        "Look at the rows (mrl rows RECIPE --all), and remove those without a question from the data.",
    ),
    Rule(
        "prompts-cut",
        lesson_rules.prompts_cut,
        "Look at the longest prompts: data that was cut at a number of characters lost the end of its questions. Take "
        "the data from before the cut; prompts that do not fit training.sequence_length are left out whole.",
    ),
    Rule(
        "right-answer-below-1",
        lesson_rules.right_answer_below_1,
        "Compare the column of the right answer with what the reward function expects (mrl environments try NAME): an "
        "answer that the data calls right should earn 1, the reward of a right answer in all metrics.",
    ),
    Rule(
        "right-answers-unrewarded",
        lesson_rules.right_answers_unrewarded,
        "Read some (mrl rollouts RUN --reward 0). Say the format in the prompt with an example, accept more of them in "
        "the reward function, or teach the format first (training.objective: supervised).",
    ),
    Rule(
        "reward-by-length",
        lesson_rules.reward_by_length,
        "Look at the reward function, and at a penalty for long answers (grpo.overlong): as it is, the policy learns a "
        "length, whatever the answers say.",
    ),
    Rule(
        "advantage-by-length",
        lesson_rules.advantage_by_length,
        "If no reward for length is meant, look at what it rewards (mrl rollouts RUN), at grpo.overlong, and at "
        "grpo.reduction, which decides how much the tokens of a long answer count.",
    ),
    Rule(
        "learned-ends",
        lesson_rules.learned_ends,
        "Look at the rows (mrl rows RECIPE): answers may be empty, in another column (data.answer, data.messages), or "
        "marked as not to be learned.",
    ),
    Rule(
        "slow-rank",
        _slow_rank,
        "All ranks wait for it. Look at its node: other processes, a hot or throttled GPU (nvidia-smi -q -d "
        "PERFORMANCE), and mrl doctor RECIPE --deep. To continue without the node: scontrol update JobId=JOB "
        "ExcNodeList=NODE, then mrl requeue RUN. Ranks that share a model (placement.training tp, cp, pp) wait for "
        "one another within a pass: any of them may be the slow one.",
    ),
)


def findings(record: Record) -> list[Finding]:
    """Return what the rules find, the warnings of the run first."""
    warned = [Finding(each.name, each.seen, f"Look at {each.look}.", each.since) for each in record.warnings]
    found = [(rule, rule.find(record)) for rule in RULES]
    return [*warned, *(Finding(rule.name, seen, rule.advice) for rule, seen in found if seen is not None)]
