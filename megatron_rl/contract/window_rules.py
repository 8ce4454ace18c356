"""Warnings of a run: rules that need only the newest lines of metrics.jsonl.

    watch = Watch()
    new = watch.add(line)       # for every line of the record, in order; returns the warnings that start with it
    watch.warnings              # the current warnings

Rank 0 logs a warning when it starts; the live view, `mrl status` and the summary of a run show the current ones. A
warning has no other effect: the run continues with the same exit code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import sqrt
from typing import Callable

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import (
    NO_SIGNAL,
    SOLVED,
    TREND_STEPS,
    WINDOW,
    Hindrance,
    Recent,
    Rule,
    Seen,
    number,
)
from megatron_rl.contract.text import printable

SIGNAL_SHARE = 0.1
"""Groups with signal, divided by the share of wrong answers. A wrong answer among right ones gives its group a signal,
so the ratio is about 1 or above while a policy improves, even near the end. Below 0.1 nine of ten wrong answers are in
groups that teach nothing."""
TRUNCATED_SHARE = 0.5
"""Share of answers cut at the length limit. Long reasoning often starts with a third; above half, most rewards are of
unfinished answers."""
LOST_SHARE = 0.01  # share of lost answers: time-outs of a sandbox or a judge lose one in a thousand
NONFINITE_SHARE = 0.001  # share of sampled tokens without a finite log-prob. Rounding may cause one in a million
DROPPED_SHARE = 0.05
"""Share of dropped prompts, apart from those without signal. Prompts known to be too long are excluded before
training."""
LARGEST_LOSS = 1e3  # a GRPO loss is a mean of advantages of about 1, times ratios that are clipped around 1
LARGEST_GRAD_NORM = 1e4  # largest plausible gradient norm. Norms before clipping are 0.01 to 10, outliers a few hundred
LARGEST_LEARNING_RATE = 0.1
"""Largest plausible learning rate. Adam moves every weight by about the learning rate; a transformer's weights are 0.01
to 1."""
COLLAPSE = 0.5  # share of the rise of the mean reward that is lost in a collapse. Runs that recover lose up to a third
COLLAPSE_ERRORS = 6.0
"""The reward must rise and fall by this many standard errors of means of WINDOW steps: the best of many windows is
high by chance. A fall below the start alone is not a collapse: runs that learn often begin with one."""
COLLAPSE_STEPS = 5 * WINDOW  # steps before the rewards are compared with their best


def _constant_rewards(recent: Recent) -> Seen | None:
    spread, reward = recent.mean("reward_std"), recent.mean("mean_reward")
    solved = recent.varied and recent.mean("right_ratio") == 1
    if spread is None or reward is None or spread > 0 or solved:
        return None
    return Seen(f"Every answer of {recent.span} earned the same reward, {reward:.3g}", recent.first)


def _no_signal(recent: Recent) -> Seen | None:
    signal, right = recent.mean("nonzero_groups_ratio"), recent.mean("right_ratio")
    if signal is None or right is None or signal >= SIGNAL_SHARE * (1 - right) or not recent.mean("reward_std"):
        return None
    return Seen(
        f"The answers to a prompt all earned the same reward in {1 - signal:.0%} of the groups of {recent.span}; "
        f"{right:.0%} of them are right",
        recent.first,
    )


def _truncated(recent: Recent) -> Seen | None:
    share = recent.mean("truncated_ratio")
    if share is None or share < TRUNCATED_SHARE:
        return None
    seen = f"{share:.0%} of the answers of {recent.span} were cut at the limit of new tokens"
    return Seen(seen, recent.since("truncated_ratio", TRUNCATED_SHARE))


def _lost_answers(recent: Recent) -> Seen | None:
    lost = sum(recent.values("failed_rollouts"))
    of_all = lost + sum(recent.values("answers"))
    if not lost or lost < LOST_SHARE * of_all:
        return None
    reasons: Counter[str] = Counter()
    for line in recent.lines:
        counts = line.values.get("failed_rollouts_by_reason")
        if isinstance(counts, dict):
            reasons.update({reason: count for reason, count in counts.items() if isinstance(count, int)})
    seen = f"{lost:.0f} of {of_all:.0f} answers of {recent.span} were lost: {_most(reasons) or 'no reason is known'}"
    return Seen(seen, recent.since("failed_rollouts", 1))


def _dropped_prompts(recent: Recent) -> Seen | None:
    first, settled, reasons = 0, 0.0, Counter[str]()
    for line in recent.lines:
        settled += (number(line, "next_ordinal") or 0) - (number(line, "first_ordinal") or 0)
        dropped = line.values.get("dropped_ordinals")
        reasons.update(map(str, dropped.values()) if isinstance(dropped, dict) else ())
        del reasons[NO_SIGNAL]
        first = first or (line.step if reasons else 0)
    lost = sum(reasons.values())
    if not lost or lost < DROPPED_SHARE * settled:
        return None
    return Seen(f"{lost} of {settled:.0f} prompts of {recent.span} were dropped: {_most(reasons)}", first)


def _most(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {printable(reason)}" for reason, count in reasons.most_common(3))


def _skipped_updates(recent: Recent) -> Seen | None:
    skipped = sum(recent.values("skipped_updates"))
    seen = f"{skipped:.0f} updates of {recent.span} were skipped, because their gradient was not finite"
    return Seen(seen, recent.since("skipped_updates", 1)) if skipped else None


def _nonfinite_loss(recent: Recent) -> Seen | None:
    lost = recent.steps_without("loss")
    return Seen(f"The loss was not finite in {len(lost)} of {recent.span}", lost[0]) if lost else None


def _nonfinite_tokens(recent: Recent) -> Seen | None:
    tokens = sum(recent.values("nonfinite_tokens"))
    sampled = sum(recent.values("answers")) * (recent.mean("answer_length") or 0)
    if not tokens or tokens < NONFINITE_SHARE * sampled:
        return None
    seen = f"{tokens:.0f} tokens of {recent.span} were excluded, because a log-prob was not finite"
    return Seen(seen, recent.since("nonfinite_tokens", 1))


def _too_large(name: str, what: str, limit: float) -> Callable[[Recent], Seen | None]:
    def find(recent: Recent) -> Seen | None:
        largest = max(map(abs, recent.values(name)), default=0.0)
        seen = f"{what} reached {largest:.3g} in {recent.span}; training needs no more than {limit:g}"
        return Seen(seen, recent.since(name, limit)) if largest > limit else None

    return find


def _zero_gradient(recent: Recent) -> Seen | None:
    norm, signal = recent.mean("grad_norm"), recent.mean("nonzero_groups_ratio")
    if norm is None or norm > 0 or not signal:  # the rule no-signal covers a zero gradient without signal
        return None
    seen = f"The gradient of {recent.span} was zero, although rewards differed in {signal:.0%} of the groups"
    return Seen(seen, recent.first)


def _zero_learning_rate(recent: Recent) -> Seen | None:
    rate = recent.mean("learning_rate")
    return Seen(f"The learning rate of {recent.span} was 0", recent.first) if rate == 0 else None


def _reward_not_rising(recent: Recent) -> Seen | None:
    steps = len(recent.rewards)
    if steps < TREND_STEPS or (recent.mean("right_ratio") or 0) >= SOLVED:
        return None
    quarter = steps // 4
    before, error_before = recent.rewards_of(quarter, quarter)
    now, error_now = recent.rewards_of(steps, quarter)
    if now - before > 2 * sqrt(error_before**2 + error_now**2):
        return None
    seen = f"The mean reward has not risen: {before:.3g} in the first {quarter} steps, {now:.3g} in the last {quarter}"
    return Seen(seen, recent.lines[-1].step - steps + 1)


def _reward_collapse(recent: Recent) -> Seen | None:
    if len(recent.rewards) < COLLAPSE_STEPS or recent.best is None:
        return None
    (first, first_error), (now, error) = recent.rewards_of(WINDOW), recent.rewards_of(len(recent.rewards))
    best, best_error, reached = recent.best
    risen, noise = best - first, COLLAPSE_ERRORS * sqrt(best_error**2 + max(first_error, error) ** 2)
    if risen <= noise or best - now <= max(COLLAPSE * risen, noise):
        return None
    seen = f"The mean reward of {recent.span} is {now:.3g}; until step {reached} it had risen to {best:.3g}"
    return Seen(seen, recent.first)


NOT_RISING = (
    "Lower optimizer.learning_rate if the reward fell in between, else raise it. Take larger batches "
    "(grpo.prompts_per_step, grpo.global_batch), more answers a problem (grpo.group_size), a smaller penalty "
    "(grpo.kl_beta) or easier problems, and read some answers (mrl rollouts RUN)."
)
FELL = (
    "Continue from before the fall with a lower optimizer.learning_rate: mrl fork RUN@STEP "
    "optimizer.learning_rate=VALUE. grpo.kl_beta and fewer updates a step hold a policy back. Answers of both times "
    "(mrl rollouts RUN) show whether it found a way to please the reward."
)

RULES: dict[str, Rule[Recent]] = {
    "lost-answers": Rule(
        "failed_rollouts",
        f"{LOST_SHARE:.0%} of the answers or more were lost",
        _lost_answers,
        "The reasons name the file and line of your code, and logs/latest has the whole error. For time-outs raise "
        "environment.reward_timeout_s.",
    ),
    "dropped-prompts": Rule(
        "dropped_ordinals",
        f"{DROPPED_SHARE:.0%} of the prompts or more were dropped, apart from those without signal",
        _dropped_prompts,
        "Change async.on_overdue, training.sequence_length or sampling.max_new_tokens.",
    ),
    "skipped-updates": Rule(
        "skipped_updates",
        "an update was skipped, because its gradient was not finite",
        _skipped_updates,
        "One now and then does no harm. If they repeat, lower optimizer.learning_rate or set optimizer.clip_grad.",
    ),
    "nonfinite-loss": Rule(
        "loss",
        "the loss of a step was not finite",
        _nonfinite_loss,
        "Lower optimizer.learning_rate, look at model.dtype, and read answers of these steps (mrl rollouts RUN).",
    ),
    "nonfinite-tokens": Rule(
        "nonfinite_tokens",
        f"{NONFINITE_SHARE:.1%} of the sampled tokens or more were left out, because a log-prob was not finite",
        _nonfinite_tokens,
        "The engine and the trainer disagree about tokens: compare model.dtype and the engine (inference.engine).",
    ),
    "learning-rate": Rule(
        "learning_rate",
        f"the learning rate was above {LARGEST_LEARNING_RATE:g}",
        _too_large("learning_rate", "The learning rate", LARGEST_LEARNING_RATE),
        "Lower optimizer.learning_rate; 1e-6 is usual for all weights of a large model, 1e-5 to 1e-4 for adapters "
        "(model.lora).",
    ),
    "loss": Rule(
        "loss",
        f"the loss was above {LARGEST_LOSS:,.0f}",
        _too_large("loss", "The loss", LARGEST_LOSS),
        "Lower optimizer.learning_rate, and look at the size of the rewards.",
    ),
    "grad-norm": Rule(
        "grad_norm",
        f"the gradient norm was above {LARGEST_GRAD_NORM:,.0f}",
        _too_large("grad_norm", "The gradient norm", LARGEST_GRAD_NORM),
        "Lower optimizer.learning_rate, or set optimizer.clip_grad.",
    ),
    "constant-rewards": Rule(
        "reward_std",
        "all answers earned the same reward, and the problems are not solved",
        _constant_rewards,
        "Check the reward function on answers that you write (mrl environments try NAME), and read some of the "
        "policy's (mrl rollouts RUN). If they became equal during the run, lower optimizer.learning_rate.",
    ),
    "no-signal": Rule(
        "nonzero_groups_ratio",
        f"the share of groups whose rewards differ was below {SIGNAL_SHARE:g} of the share of wrong answers",
        _no_signal,
        "Raise grpo.group_size or sampling.temperature, choose easier or harder problems (curriculum), or set "
        "grpo.dynamic_sampling.enabled.",
    ),
    "truncated": Rule(
        "truncated_ratio",
        f"{TRUNCATED_SHARE:.0%} of the answers or more were cut at sampling.max_new_tokens",
        _truncated,
        "Raise sampling.max_new_tokens, or check sampling.stop and the chat template (environment.args).",
    ),
    "zero-gradient": Rule(
        "grad_norm",
        "the gradient was 0, although rewards differed",
        _zero_gradient,
        "Look at grpo.overlong, grpo.eps_low and grpo.eps_high, which may remove every token.",
    ),
    "zero-learning-rate": Rule(
        "learning_rate",
        "the learning rate was 0",
        _zero_learning_rate,
        "Set optimizer.learning_rate, optimizer.decay and optimizer.min_learning_rate.",
    ),
    "reward-collapse": Rule(
        "mean_reward",
        f"the mean reward lost {COLLAPSE:.0%} of its rise or more, by {COLLAPSE_ERRORS:g} standard errors",
        _reward_collapse,
        FELL,
    ),
    "reward-not-rising": Rule(
        "mean_reward",
        f"of {TREND_STEPS} steps or more, the last quarter earned no more than the first",
        _reward_not_rising,
        NOT_RISING,
    ),
}


class Watch:
    def __init__(self, recent: Recent | None = None, since: Mapping[str, int | None] | None = None) -> None:
        """
        recent: of a record whose lines were added before.
        since: first step of each warning that holds after its newest line.
        """
        self.recent = recent or Recent()
        self._warnings = self._look(since) if since else {}

    @property
    def warnings(self) -> list[Hindrance]:
        """Warnings that hold after the newest line, in the order of RULES."""
        return [self._warnings[name] for name in RULES if name in self._warnings]

    def add(self, line: MetricsLine) -> list[Hindrance]:
        """Add a line; return the warnings that start with it. A continuing warning keeps its first step."""
        self.recent.add(line)
        before = self._warnings
        self._warnings = self._look({name: warning.since for name, warning in before.items()})
        return [warning for name, warning in self._warnings.items() if name not in before]

    def _look(self, since: Mapping[str, int | None]) -> dict[str, Hindrance]:
        found = ((name, rule, rule.find(self.recent)) for name, rule in RULES.items())
        return {
            name: Hindrance(name, since.get(name, seen.since), seen.text, rule.advice)
            for name, rule, seen in found
            if seen is not None
        }
