"""Rules about a run's curves: its metrics over all steps, its evaluations and its slow ranks."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from statistics import fmean
from typing import Any

from launcher.explain.record import Record, held_out_losses
from launcher.explain.trend import fall_of, rise_of
from launcher.runs.slow_ranks import OFTEN, SHARE, STEPS
from megatron_rl.contract.learning import SOLVED, TREND_STEPS, WINDOW, Rule, Seen, number
from megatron_rl.contract.text import printable
from megatron_rl.contract.window_rules import FELL, NOT_RISING
from megatron_rl.recipe.vllm_precision import precision_of

ENTROPY_LEFT = 0.1
"""Share of the first steps' entropy below which it has collapsed, unless the problems are solved: a policy that solves
its problems is certain of its answers for a good reason."""
SIGNAL_LEFT = 0.5
"""Share of the first steps' groups with signal that is left where a collapse does harm."""
FADED = 1 / 3
"""Share of the first steps' groups with signal below which it fades, if it is also below half of the wrong answers."""
CLIPPED = {"gspo": 0.8, "gspo_token": 0.8}
"""Share of the trained tokens beyond the bounds of a policy loss that is too much, where it is not CLIPPED_USUALLY.
Whole sequences are clipped by gspo: 10% to 65% of the tokens in runs that learn."""
CLIPPED_USUALLY = 0.3
"""The same for the other losses. Runs of `clip` with four updates a step that learn have up to 20%."""
DIFFERENCE = 0.05
"""Mean difference in nats between the log-probs of the trainer and of the engine. In bf16 0.005 to 0.02 are usual,
in fp32 1e-6."""
DIFFERENCE_OF_8_BITS = 0.2
"""The same for a vLLM with weights or a cache of 8 bits, from the effect on a small model (run/probe_tolerance.py)."""
STALENESS = 4.0
"""Mean age of answers in optimizer steps. Peers report losses of accuracy beyond about this age without correction."""
BF16_STEP = 2.0**-9
"""Largest relative change of a weight that rounding to bf16 can remove."""
TYPICAL_WEIGHT = 0.02
"""Magnitude of a weight of a language model, the usual standard deviation of its initialisation."""
LONG_ENOUGH = 50
"""Steps after which a reward that is not higher than at the start is a finding, and at least half of those of the
recipe: many runs that learn begin with a flat stretch, or a dip."""
LOST = 0.3
"""Fall of the mean reward from its best window, as a share of the rise until then, that matters."""
GAP = 0.25
"""Accuracy on trained problems less that on held-out ones where answers are memorised."""
ROSE = 0.05
"""Rise of the loss on held-out rows above its best value, as a share of it, where rows are memorised."""
FALLEN = 0.05
"""Fall of the accuracy on held-out problems from its best value that goes with it."""


def reward_not_above_start(record: Record) -> Seen | None:
    rewards, right = record.series("mean_reward"), record.last("right_ratio")
    planned = record.key("training.steps", int) or 0
    if not max(LONG_ENOUGH, planned // 2) <= len(rewards) < TREND_STEPS or (right is not None and right >= SOLVED):
        return None  # from TREND_STEPS on the warning reward-not-rising says it
    rise = rise_of(rewards)
    if rise.significant:
        return None
    return Seen(
        f"The mean reward of the last {rise.quarter} of {len(rewards)} steps is {rise.now:.3g}, and was "
        f"{rise.before:.3g} in the first {rise.quarter}; the standard error of the difference is {rise.error:.2g}. In "
        f"between it was {min(rewards):.3g} to {max(rewards):.3g}"
    )


def reward_fell(record: Record) -> Seen | None:
    fall = fall_of(record.series("mean_reward"))
    if fall is None or any(one.name == "reward-collapse" for one in record.warnings):
        return None
    if fall.best - fall.last <= LOST * (fall.best - fall.first):
        return None
    return Seen(
        f"The mean reward of {fall.window} steps fell from {fall.best:.3g}, its best, reached at step {fall.reached}, "
        f"to {fall.last:.3g}"
    )


def signal_fading(record: Record) -> Seen | None:
    signal, right = record.change("nonzero_groups_ratio"), record.last("right_ratio")
    if signal is None or right is None or right >= SOLVED:
        return None
    before, now = signal
    if now >= min(FADED * before, (1 - right) / 2):
        return None
    return Seen(
        f"Groups whose answers differ in reward fell from {before:.0%} to {now:.0%}, while {1 - right:.0%} of the "
        "answers are still wrong: most problems are now always wrong, and teach nothing"
    )


def entropy_collapse(record: Record) -> Seen | None:
    entropy, signal, right = record.change("entropy"), record.change("nonzero_groups_ratio"), record.last("right_ratio")
    if entropy is None or signal is None or right is None:
        return None
    if entropy[1] >= ENTROPY_LEFT * entropy[0] or right >= SOLVED or signal[1] >= SIGNAL_LEFT * signal[0]:
        return None
    return Seen(
        f"The entropy fell from {entropy[0]:.3g} to {entropy[1]:.3g} nats a token, and groups with signal from "
        f"{signal[0]:.0%} to {signal[1]:.0%}, while {right:.0%} of the answers are right: the policy gives the same "
        "answers again and again"
    )


def clipped(record: Record) -> Seen | None:
    share, loss = record.last("clip_fraction"), record.key("grpo.policy_loss", str) or ""
    limit = CLIPPED.get(loss, CLIPPED_USUALLY)
    if share is None or share <= limit:
        return None
    return Seen(
        f"The bounds of the policy loss ({loss}) removed the gradient of {share:.0%} of the trained tokens in the last "
        f"{WINDOW} steps; runs that learn stay below {limit:.0%}"
    )


def engine_mismatch(record: Record) -> Seen | None:
    difference, age = record.last("inference_logprob_difference"), record.last("staleness_mean")
    short = precision_of(record.key("inference.vllm.args", dict) or {}).beyond(record.key("model.dtype", str))
    limit, where = (DIFFERENCE_OF_8_BITS, "with 8 bits") if short else (DIFFERENCE, "in bf16")
    if difference is None or age is None or difference <= limit or age > 0:  # older weights differ for good reason
        return None
    return Seen(
        f"The engine that samples and the trainer differ by {difference:.3g} nats a token in the last {WINDOW} steps, "
        f"although they have the same weights; {where} {limit:g} is much"
    )


def stale(record: Record) -> Seen | None:
    age = record.last("staleness_mean")
    if age is None or age < STALENESS or all(one.get("importance") or one.get("rejection") for one in _grpo(record)):
        return None
    return Seen(
        f"The answers of the last {WINDOW} steps were sampled {age:.1f} optimizer steps before they were trained on, "
        "and grpo.importance corrects for nothing"
    )


def _grpo(record: Record) -> list[Mapping[str, Any]]:
    """Return the keys of `grpo` as each environment that is trained on has them."""
    listed = [one for one in record.key("environments", list) or [] if isinstance(one, Mapping)]
    trained = [one for one in listed if not one.get("evaluation_only") and one.get("weight", 1.0)]
    shared = record.key("grpo", dict) or {}
    return [{**shared, **own} for one in trained or [{}] if isinstance(own := one.get("grpo") or {}, Mapping)]


def learning_rate_below_bf16(record: Record) -> Seen | None:
    rates = record.series("learning_rate")
    if record.key("model.dtype", str) != "bf16" or len(rates) < WINDOW or not any(rates):
        return None
    updates = max(1.0, (number(record.lines[-1], "policy_version") or 0) / len(record.lines))
    steps = record.key("training.steps", int) or len(rates)
    moved = sum(rates) * updates + rates[-1] * updates * max(0, steps - len(rates))
    if moved >= BF16_STEP * TYPICAL_WEIGHT:
        return None
    return Seen(
        f"All {steps} steps together move a weight by {moved:.2g} at most (Adam: about the learning rate an update). "
        f"A weight of {TYPICAL_WEIGHT:g} in bf16 changes only from {BF16_STEP * TYPICAL_WEIGHT:.2g} on, so the policy "
        "that answers stays the same"
    )


def memorised(record: Record) -> Seen | None:
    trained, held_out = _accuracies(record, "trained"), _accuracies(record, "held_out")
    if len(held_out) < 2 or not trained:
        return None
    gap, best = trained[-1] - held_out[-1], max(held_out)
    if gap <= GAP or best - held_out[-1] <= FALLEN:
        return None
    return Seen(
        f"Greedy accuracy is {trained[-1]:.2f} on trained problems and {held_out[-1]:.2f} on held-out ones, where it "
        f"was {best:.2f}: the policy memorises"
    )


def held_out_loss_rose(record: Record) -> Seen | None:
    """The held-out loss has left its best value, while that of the rows trained on has fallen further."""
    losses = held_out_losses(record.evaluations).get("held_out_rows", [])
    if len(losses) < 3:
        return None
    (step, best), (newest, last) = min(losses, key=itemgetter(1)), losses[-1]
    trained = [value for line in record.lines if (value := number(line, "loss")) is not None and line.step > step]
    half = len(trained) // 2
    if last <= best * (1 + ROSE) or not half:
        return None
    before, now = fmean(trained[:half]), fmean(trained[-half:])
    if now >= before:
        return None
    return Seen(
        f"The loss on held-out rows was {best:.4g} after step {step}, its best, and is {last:.4g} after step {newest}, "
        f"while that on the rows trained on went on falling, from {before:.4g} to {now:.4g}: the policy memorises them"
    )


def _accuracies(record: Record, name: str) -> list[float]:
    found = []
    for line in record.evaluations:
        values = [number(line, key) for key in line.values if key.endswith(f"{name}/greedy_accuracy")]
        known = [value for value in values if value is not None]
        if known:
            found.append(sum(known) / len(known))
    return found


def component_never_earned(record: Record) -> Seen | None:
    names = sorted({name for line in record.lines[-WINDOW:] for name in line.values if name.startswith("reward/")})
    never = [
        name.removeprefix("reward/") for name in names if len(record.lines) >= WINDOW and not any(record.series(name))
    ]
    if not never:
        return None
    those = f"{'component' if len(never) == 1 else 'components'} {printable(', '.join(never))}"
    return Seen(f"No answer of {len(record.lines)} steps has earned anything of the {those} of the reward")


def slow_rank(record: Record) -> Seen | None:
    text = "; ".join(map(str, record.slow_ranks))
    return Seen(text[:1].upper() + text[1:]) if text else None


RULES: dict[str, Rule[Record]] = {
    "reward-not-above-start": Rule(
        "mean_reward",
        f"before step {TREND_STEPS}, with half of the recipe's steps made and {LONG_ENOUGH} at least, the last quarter "
        "earned no more than the first",
        reward_not_above_start,
        NOT_RISING,
    ),
    "reward-fell": Rule(
        "mean_reward",
        f"the mean reward rose, and fell from its best by {LOST:.0%} of the rise, both by more than noise",
        reward_fell,
        FELL,
    ),
    "signal-fading": Rule(
        "nonzero_groups_ratio",
        f"groups whose rewards differ fell below {FADED:.0%} of what they were at the start, and below half of the "
        "wrong answers",
        signal_fading,
        "Train on problems of all degrees of difficulty (curriculum, grpo.dynamic_sampling), with a larger "
        "grpo.group_size, or with a lower optimizer.learning_rate.",
    ),
    "entropy-collapse": Rule(
        "entropy",
        f"entropy fell below {ENTROPY_LEFT:.0%} and groups with signal below {SIGNAL_LEFT:.0%} of what they were at "
        "the start, though problems are unsolved",
        entropy_collapse,
        "Set grpo.eps_high above grpo.eps_low (0.28 as DAPO does), add grpo.entropy_coefficient (0.001), lower "
        "optimizer.learning_rate, or train on harder problems (curriculum).",
    ),
    "clipped": Rule(
        "clip_fraction",
        f"the bounds of the loss remove the gradient of more than {CLIPPED_USUALLY:.0%} of the tokens, for gspo of "
        f"{CLIPPED['gspo']:.0%}, which is more than in any run that learned",
        clipped,
        "Lower optimizer.learning_rate, or take fewer updates a step: a larger grpo.global_batch or fewer "
        "grpo.iterations.",
    ),
    "engine-mismatch": Rule(
        "inference_logprob_difference",
        f"engine and trainer differ in log-probs by more than {DIFFERENCE:g} nats a token, with the same weights",
        engine_mismatch,
        "Look for sampling fields that the engine takes from elsewhere, and another chat template. "
        "grpo.importance with upper: 2.0 corrects for what remains.",
    ),
    "stale": Rule(
        "staleness_mean",
        f"answers are {STALENESS:g} optimizer steps old or more, and neither grpo.importance nor grpo.rejection is set",
        stale,
        "Set grpo.importance.upper to 2.0, lower async.max_lag, or give generation more GPUs (mrl plan).",
    ),
    "learning-rate-below-bf16": Rule(
        "learning_rate",
        "all steps together cannot change a typical weight in bf16",
        learning_rate_below_bf16,
        "Raise optimizer.learning_rate; 1e-6 is usual for all weights, 1e-5 to 1e-4 for adapters (model.lora).",
    ),
    "memorised": Rule(
        "eval/SET/greedy_accuracy",
        f"accuracy on held-out problems fell by more than {FALLEN:g} from its best, and is more than {GAP:g} below "
        "that on trained ones",
        memorised,
        "Stop earlier (evaluation.every shows when), use more problems, or add grpo.kl_beta.",
    ),
    "held-out-loss-rose": Rule(
        "eval/held_out_rows/loss",
        f"the loss on held-out rows is more than {ROSE:.0%} above its best, since which that on the rows trained on "
        "has fallen",
        held_out_loss_rose,
        "Take the checkpoint of that step if it is kept. training.early_stop ends a run there and keeps it; fewer "
        "passes (training.steps, data.sets epochs), more rows or a lower optimizer.learning_rate avoid it.",
    ),
    "component-never-earned": Rule(
        "reward/NAME",
        f"a component of the reward was 0 for every answer of {WINDOW} steps or more",
        component_never_earned,
        "Look at answers (mrl rollouts RUN): the prompt may not say what the component wants, or its function never "
        "finds it. A few worked examples teach a format (training.objective: supervised).",
    ),
    "slow-rank": Rule(
        "time/wait_s",
        f"the same rank, or ranks of the same node, delayed the others in {OFTEN} of the last {STEPS} steps, by "
        f"{SHARE:.0%} of their time",
        slow_rank,
        "All ranks wait for it. Look at its node: other processes, a hot or throttled GPU (nvidia-smi -q -d "
        "PERFORMANCE), and mrl doctor RECIPE --deep. To continue without the node: scontrol update JobId=JOB "
        "ExcNodeList=NODE, then mrl requeue RUN. Ranks that share a model (placement.training tp, cp, pp) wait for "
        "one another within a pass: any of them may be the slow one.",
    ),
}
