"""The rules. Each is a pure function of a Record, and has a section of its name in docs/troubleshooting.md.

A rule speaks only of what the record shows: the evidence has the numbers, and what to try names keys of the recipe. The
warnings that a run shows while it trains (contract/learning.py) are findings here too. The rules of this file need more
than the newest steps: the recipe, the evaluations, or the beginning of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from launcher.explain import curve_rules, lesson_rules
from launcher.explain.record import Record


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


RULES = (
    Rule(
        "reward-not-above-start",
        curve_rules.reward_not_above_start,
        "Lower optimizer.learning_rate if the reward fell in between, else raise it. Take fewer updates a step (a "
        "larger grpo.global_batch), more answers a problem (grpo.group_size) or easier problems.",
    ),
    Rule(
        "reward-fell",
        curve_rules.reward_fell,
        "Continue from before the fall with a lower optimizer.learning_rate: mrl fork RUN@STEP "
        "optimizer.learning_rate=VALUE. grpo.kl_beta and fewer updates a step hold a policy back.",
    ),
    Rule(
        "signal-fading",
        curve_rules.signal_fading,
        "Train on problems of all degrees of difficulty (curriculum, grpo.dynamic_sampling), with a larger "
        "grpo.group_size, or with a lower optimizer.learning_rate.",
    ),
    Rule(
        "entropy-collapse",
        curve_rules.entropy_collapse,
        "Set grpo.eps_high above grpo.eps_low (0.28 as DAPO does), add grpo.entropy_coefficient (0.001), lower "
        "optimizer.learning_rate, or train on harder problems (curriculum).",
    ),
    Rule(
        "clipped",
        curve_rules.clipped,
        "Lower optimizer.learning_rate, or take fewer updates a step: a larger grpo.global_batch or fewer "
        "grpo.iterations.",
    ),
    Rule(
        "engine-mismatch",
        curve_rules.engine_mismatch,
        "Look for sampling fields that the engine takes from elsewhere, a quantised engine and a chat template of its "
        "own. grpo.importance with upper: 2.0 corrects for what remains.",
    ),
    Rule(
        "stale",
        curve_rules.stale,
        "Set grpo.importance.upper to 2.0, lower async.max_lag, or give generation more GPUs (mrl plan).",
    ),
    Rule(
        "learning-rate-below-bf16",
        curve_rules.learning_rate_below_bf16,
        "Raise optimizer.learning_rate; 1e-6 is usual for all weights, 1e-5 to 1e-4 for adapters (model.lora).",
    ),
    Rule(
        "memorised",
        curve_rules.memorised,
        "Stop earlier (evaluation.every shows when), use more problems, or add grpo.kl_beta.",
    ),
    Rule(
        "component-never-earned",
        curve_rules.component_never_earned,
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
        curve_rules.slow_rank,
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
