"""Warnings that a run learns nothing or loses something: pure rules over lines of metrics.jsonl.

    watch = Watch()
    new = watch.add(line)       # for every line of the record, in order; returns the warnings that start with it
    watch.warnings              # the current warnings

Rank 0 logs a warning when it starts; the live view, `mrl status` and the summary of a run show the current ones. A
warning has no other effect: the run continues with the same exit code.
"""

from __future__ import annotations

from collections import Counter, deque
from math import inf, sqrt
from typing import Callable, NamedTuple, Optional

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.shapes import LARGEST_INT
from megatron_rl.contract.text import printable

WINDOW = 10
"""Steps that most rules look back: enough to ignore one odd batch, few enough to warn early."""
LEAST = 3
"""Fewest steps of a mean: the first batches of a small run may all be odd."""
SIGNAL_SHARE = 0.1
"""Groups with signal, divided by the share of wrong answers. A wrong answer among right ones gives its group a signal,
so the ratio is about 1 or above while a policy improves, even near the end. Below 0.1 nine of ten wrong answers are in
groups that teach nothing."""
TRUNCATED_SHARE = 0.5
"""Share of answers cut at the length limit. Long reasoning often starts with a third; above half, most rewards are of
unfinished answers."""
LOST_SHARE = 0.01
"""Share of lost answers. Occasional time-outs of a sandbox or a judge lose one in a thousand; more is a fault."""
NONFINITE_SHARE = 0.001
"""Share of sampled tokens without a finite log-prob. Rounding may cause one in a million."""
DROPPED_SHARE = 0.05
"""Share of dropped prompts, apart from those without signal. Prompts known to be too long are excluded before
training."""
LARGEST_LOSS = 1e3
"""Largest plausible loss. A GRPO loss is a mean of advantages of about 1, times ratios that are clipped around 1."""
LARGEST_GRAD_NORM = 1e4
"""Largest plausible gradient norm. Norms before clipping are 0.01 to 10, outliers a few hundred."""
LARGEST_LEARNING_RATE = 0.1
"""Largest plausible learning rate. Adam moves every weight by about the learning rate; a transformer's weights are 0.01
to 1."""
TREND_STEPS = 300
"""Steps before the first and the last quarter of a run are compared: the demo with a lag has a dip in its first 200."""
COLLAPSE = 0.5
"""Share of the rise of the mean reward that is lost in a collapse. Runs that recover lose up to a third."""
COLLAPSE_ERRORS = 6.0
"""Standard errors of means of WINDOW steps by which the reward has to rise and to fall: the best of many windows is
high by chance. A fall below the start alone is no collapse: runs that learn often begin with one."""
COLLAPSE_STEPS = 5 * WINDOW
"""Steps before the rewards are compared with their best."""
SOLVED = 0.9
"""Share of right answers above which the rewards need not rise further."""


NO_SIGNAL = "no signal"
"""Reason in dropped_ordinals for prompts rejected by dynamic sampling, which is intended."""


class LearningWarning(NamedTuple):
    """Observation of a rule."""

    name: str  # of the rule
    since: int  # first step of the warning
    seen: str  # the observation, with numbers
    look: str  # recipe keys and files to look at

    def __str__(self) -> str:
        return f"{self.seen} (since step {self.since}). Look at {self.look}."


Found = Optional[tuple[int, str]]
"""First step of the window at which a rule's condition holds, and the observation; None: it does not hold."""


class Rule(NamedTuple):
    name: str
    find: Callable[[Recent], Found]
    look: str


class Recent:
    """The newest steps of a record, at most WINDOW, and the mean rewards of all steps."""

    def __init__(self) -> None:
        self.lines: deque[MetricsLine] = deque(maxlen=WINDOW)
        self._values: dict[str, list[float]] = {}
        self.rewards = [(0.0, 0.0)]
        """Sums of the first 0, 1, 2, ... mean rewards, and of their squares."""
        self.best = (-inf, 0.0, 0)
        """Largest mean reward of WINDOW steps, its standard error, and the step that completed it."""
        self.varied = False
        """Whether the answers of any step have had different rewards."""

    def add(self, line: MetricsLine) -> None:
        self.lines.append(line)
        self._values.clear()
        reward = number(line, "mean_reward")
        if reward is not None:
            total, squares = self.rewards[-1]
            self.rewards.append((total + reward, squares + reward * reward))
            if len(self.rewards) > WINDOW:
                self.best = max(self.best, (*self.rewards_of(len(self.rewards) - 1), line.step))
        self.varied = self.varied or bool(number(line, "reward_std"))

    def rewards_of(self, end: int) -> tuple[float, float]:
        """Return the mean of WINDOW mean rewards, and its standard error.

        end: index in `rewards` of the sums up to the last one.
        """
        return _mean_and_error(self.rewards[end - WINDOW], self.rewards[end], WINDOW)

    @property
    def first(self) -> int:
        """First step of the window."""
        return self.lines[0].step

    @property
    def span(self) -> str:
        return f"the last {len(self.lines)} steps" if len(self.lines) > 1 else "the last step"

    def values(self, name: str) -> list[float]:
        if name not in self._values:  # several rules ask for the same
            self._values[name] = [value for line in self.lines if (value := number(line, name)) is not None]
        return self._values[name]

    def mean(self, name: str) -> float | None:
        """Return the mean; None if fewer than LEAST steps have a value."""
        values = self.values(name)
        return sum(values) / len(values) if len(values) >= LEAST else None

    def steps_without(self, name: str) -> list[int]:
        """Return the steps with an update whose value is missing: numbers that are not finite are not recorded."""
        updated = (line for line in self.lines if number(line, "learning_rate") is not None)
        return [line.step for line in updated if number(line, name) is None]

    def since(self, name: str, least: float) -> int:
        """Return the first step whose absolute value is at least `least`."""
        return next((line.step for line in self.lines if abs(number(line, name) or 0) >= least), self.first)


def number(line: MetricsLine, name: str) -> float | None:
    """Return a value of one step; None if it was not finite, is too large for a float, or was not measured."""
    value = line.values.get(name)
    if type(value) is int and abs(value) <= LARGEST_INT:  # not isinstance: a bool is an int
        return value
    return value if type(value) is float else None


def _constant_rewards(recent: Recent) -> Found:
    spread, reward = recent.mean("reward_std"), recent.mean("mean_reward")
    solved = recent.varied and recent.mean("right_ratio") == 1
    if spread is None or reward is None or spread > 0 or solved:
        return None
    return recent.first, f"Every answer of {recent.span} earned the same reward, {reward:.3g}"


def _no_signal(recent: Recent) -> Found:
    signal, right = recent.mean("nonzero_groups_ratio"), recent.mean("right_ratio")
    if signal is None or right is None or signal >= SIGNAL_SHARE * (1 - right) or not recent.mean("reward_std"):
        return None
    return recent.first, (
        f"The answers to a prompt all earned the same reward in {1 - signal:.0%} of the groups of {recent.span}; "
        f"{right:.0%} of them are right"
    )


def _truncated(recent: Recent) -> Found:
    share = recent.mean("truncated_ratio")
    if share is None or share < TRUNCATED_SHARE:
        return None
    seen = f"{share:.0%} of the answers of {recent.span} were cut at the limit of new tokens"
    return recent.since("truncated_ratio", TRUNCATED_SHARE), seen


def _lost_answers(recent: Recent) -> Found:
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
    return recent.since("failed_rollouts", 1), seen


def _dropped_prompts(recent: Recent) -> Found:
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
    return first, f"{lost} of {settled:.0f} prompts of {recent.span} were dropped: {_most(reasons)}"


def _most(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} x {printable(reason)}" for reason, count in reasons.most_common(3))


def _skipped_updates(recent: Recent) -> Found:
    skipped = sum(recent.values("skipped_updates"))
    seen = f"{skipped:.0f} updates of {recent.span} were skipped, because their gradient was not finite"
    return (recent.since("skipped_updates", 1), seen) if skipped else None


def _nonfinite_loss(recent: Recent) -> Found:
    lost = recent.steps_without("loss")
    return (lost[0], f"The loss was not finite in {len(lost)} of {recent.span}") if lost else None


def _nonfinite_tokens(recent: Recent) -> Found:
    tokens = sum(recent.values("nonfinite_tokens"))
    sampled = sum(recent.values("answers")) * (recent.mean("answer_length") or 0)
    if not tokens or tokens < NONFINITE_SHARE * sampled:
        return None
    seen = f"{tokens:.0f} tokens of {recent.span} were excluded, because a log-prob was not finite"
    return recent.since("nonfinite_tokens", 1), seen


def _too_large(name: str, what: str, limit: float) -> Callable[[Recent], Found]:
    def find(recent: Recent) -> Found:
        largest = max(map(abs, recent.values(name)), default=0.0)
        seen = f"{what} reached {largest:.3g} in {recent.span}; training needs no more than {limit:g}"
        return (recent.since(name, limit), seen) if largest > limit else None

    return find


def _zero_gradient(recent: Recent) -> Found:
    norm, signal = recent.mean("grad_norm"), recent.mean("nonzero_groups_ratio")
    if norm is None or norm > 0 or not signal:  # the rule no-signal covers a zero gradient without signal
        return None
    return (
        recent.first,
        f"The gradient of {recent.span} was zero, although rewards differed in {signal:.0%} of the groups",
    )


def _zero_learning_rate(recent: Recent) -> Found:
    rate = recent.mean("learning_rate")
    return (recent.first, f"The learning rate of {recent.span} was 0") if rate == 0 else None


def _reward_not_rising(recent: Recent) -> Found:
    steps = len(recent.rewards) - 1
    if steps < TREND_STEPS or (recent.mean("right_ratio") or 0) >= SOLVED:
        return None
    quarter = steps // 4
    before, error_before = _mean_and_error(recent.rewards[0], recent.rewards[quarter], quarter)
    now, error_now = _mean_and_error(recent.rewards[steps - quarter], recent.rewards[steps], quarter)
    if now - before > 2 * sqrt(error_before**2 + error_now**2):
        return None
    seen = f"The mean reward has not risen: {before:.3g} in the first {quarter} steps, {now:.3g} in the last {quarter}"
    return recent.lines[-1].step - steps + 1, seen


def _reward_collapse(recent: Recent) -> Found:
    if len(recent.rewards) <= COLLAPSE_STEPS:
        return None
    (first, first_error), (now, error) = recent.rewards_of(WINDOW), recent.rewards_of(len(recent.rewards) - 1)
    best, best_error, reached = recent.best
    risen, noise = best - first, COLLAPSE_ERRORS * sqrt(best_error**2 + max(first_error, error) ** 2)
    if risen <= noise or best - now <= max(COLLAPSE * risen, noise):
        return None
    return (
        recent.first,
        f"The mean reward of {recent.span} is {now:.3g}; until step {reached} it had risen to {best:.3g}",
    )


def _mean_and_error(low: tuple[float, float], high: tuple[float, float], count: int) -> tuple[float, float]:
    """Return the mean of `count` values and its standard error, from the sums of values and of squares before and after
    them."""
    mean, squares = (high[0] - low[0]) / count, (high[1] - low[1]) / count
    return mean, sqrt(max(0.0, squares - mean * mean) / count)


RULES = (
    Rule("lost-answers", _lost_answers, "logs/latest, environment.reward_timeout_s and the reward function"),
    Rule("dropped-prompts", _dropped_prompts, "async.on_overdue, training.sequence_length and sampling.max_new_tokens"),
    Rule("skipped-updates", _skipped_updates, "optimizer.learning_rate and optimizer.clip_grad"),
    Rule("nonfinite-loss", _nonfinite_loss, "optimizer.learning_rate, model.dtype and mrl rollouts"),
    Rule("nonfinite-tokens", _nonfinite_tokens, "the engine that samples (inference.engine) and model.dtype"),
    Rule(
        "learning-rate",
        _too_large("learning_rate", "The learning rate", LARGEST_LEARNING_RATE),
        "optimizer.learning_rate",
    ),
    Rule("loss", _too_large("loss", "The loss", LARGEST_LOSS), "optimizer.learning_rate and the size of rewards"),
    Rule(
        "grad-norm",
        _too_large("grad_norm", "The gradient norm", LARGEST_GRAD_NORM),
        "optimizer.learning_rate and optimizer.clip_grad",
    ),
    Rule(
        "constant-rewards",
        _constant_rewards,
        "the reward function, optimizer.learning_rate and mrl rollouts",
    ),
    Rule("no-signal", _no_signal, "sampling.temperature, grpo.group_size and how hard the problems are"),
    Rule("truncated", _truncated, "sampling.max_new_tokens, sampling.stop and the chat template (environment.args)"),
    Rule("zero-gradient", _zero_gradient, "grpo.overlong, grpo.eps_low and grpo.eps_high"),
    Rule("zero-learning-rate", _zero_learning_rate, "optimizer.learning_rate, decay and min_learning_rate"),
    Rule("reward-collapse", _reward_collapse, "optimizer.learning_rate, grpo.kl_beta and mrl rollouts"),
    Rule("reward-not-rising", _reward_not_rising, "optimizer.learning_rate, grpo.prompts_per_step and mrl rollouts"),
)


class Watch:
    """Applies the rules to a record, line by line."""

    def __init__(self) -> None:
        self._recent = Recent()
        self._warnings: dict[str, LearningWarning] = {}

    @property
    def warnings(self) -> list[LearningWarning]:
        """Warnings that hold after the newest line, in the order of RULES."""
        return [self._warnings[rule.name] for rule in RULES if rule.name in self._warnings]

    def add(self, line: MetricsLine) -> list[LearningWarning]:
        """Add a line; return the warnings that start with it. A continuing warning keeps its first step."""
        self._recent.add(line)
        before, self._warnings = self._warnings, {}
        for rule in RULES:
            found = rule.find(self._recent)
            if found is not None:
                since = before[rule.name].since if rule.name in before else found[0]
                self._warnings[rule.name] = LearningWarning(rule.name, since, found[1], rule.look)
        return [warning for name, warning in self._warnings.items() if name not in before]
