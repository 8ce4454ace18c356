"""Metrics of answers and prompts: lengths, turns, losses, and the position in the stream of prompts."""

from __future__ import annotations

from typing import Any

from megatron_rl.rank.metrics.metric import Metric, StepReport, of_answers, ratio


def _turns_mean(step: StepReport) -> Any:
    batch = step.stats.batch
    return batch.turns / batch.answers if batch.turns > batch.answers or batch.with_tools else None


def _branches_mean(step: StepReport) -> Any:
    batch = step.stats.batch
    return batch.sequences / batch.answers if batch.sequences > batch.answers else None


ANSWERS: dict[str, Metric] = {
    "answer_length": Metric(
        "mean tokens per answer",
        of_answers(lambda s: s.batch.answer_tokens),
        unit="tokens",
        good="stable, or grows slowly where reasoning helps",
        advice="If it grows and the reward does not, use `grpo.reduction: token` and `grpo.overlong`; if it shrinks to "
        "a few tokens, the reward pays for short answers: read some.",
    ),
    "answer_length_max": Metric("longest answer", lambda step: step.stats.batch.answer_length_max, unit="tokens"),
    "answer_length_min": Metric("shortest answer", lambda step: step.stats.batch.answer_length_min, unit="tokens"),
    "turns_mean": Metric(
        "mean turns of the model per answer (absent if all have one and no tools were offered)",
        _turns_mean,
        unit="turns",
    ),
    "branches_mean": Metric(
        "mean sequences of tokens per answer, more than one where a program edits its conversation or has several "
        "(absent if all answers have one)",
        _branches_mean,
        unit="sequences",
    ),
    "tool_calls_mean": Metric(
        "mean tool calls per answer that tools were offered to (absent without such answers)",
        lambda step: ratio(step.stats.batch.tool_calls, step.stats.batch.with_tools),
        unit="calls",
        good="above 0 where problems need tools",
        advice="A model that never calls tools needs worked examples first (`training.objective: supervised`).",
    ),
    "prompt_length": Metric("mean tokens per prompt", of_answers(lambda s: s.batch.prompt_tokens), unit="tokens"),
    "truncated_ratio": Metric(
        "share of answers cut at sampling.max_new_tokens",
        of_answers(lambda s: s.batch.truncated),
        unit="share",
        good="below 0.1",
    ),
    "failed_rollouts": Metric(
        "answers lost; reasons are in failed_rollouts_by_reason",
        lambda step: step.stats.batch.failed,
        unit="answers",
        good="0",
    ),
    "failed_rollouts_by_reason": Metric(
        "answers lost, by reason (absent if there are none)",
        lambda step: dict(sorted(step.failures.items())) or None,
        unit="answers by reason",
    ),
    "undecided_answers": Metric(
        "mathematical answers that count as wrong because comparing them exceeds verify_timeout_s or verify_memory_gib "
        "(absent if there are none)",
        lambda step: step.stats.batch.undecided or None,
        unit="answers",
        good="absent, or a handful",
        advice="Read some: a policy may drift into formulas that never end.",
    ),
    "packed_tokens_ratio": Metric(
        "packed tokens over those of the trajectories that are run: below 1 if prefixes are shared",
        lambda step: ratio(step.stats.batch.packed_tokens, step.stats.batch.unpacked_tokens),
        unit="ratio",
    ),
    "generation_rounds": Metric(
        "rounds of generation (dynamic sampling draws several)",
        lambda step: step.generation_rounds,
        unit="rounds",
        good="1 to 3",
        advice="More means that most groups have no signal: choose other problems, or use a `curriculum`.",
    ),
    "first_ordinal": Metric("first prompt of the step in the prompt stream", lambda step: step.first_ordinal),
    "next_ordinal": Metric("first prompt of the next step", lambda step: step.next_ordinal),
    "curriculum_left_out": Metric(
        "problems that the curriculum has left out since the previous step (absent without a curriculum, as are the "
        "next two)",
        unit="problems",
    ),
    "curriculum_known": Metric("problems with a known pass rate", unit="problems"),
    "curriculum_pass_rate": Metric(
        "mean of the recent pass rates of those problems",
        unit="share",
        good="0.2 to 0.8",
        advice="Near 0 or 1 the problems are too hard or solved: change the data or the curriculum's range.",
    ),
    "dropped_ordinals": Metric(
        "prompts settled without training, with the reason (absent if there are none)",
        lambda step: {str(ordinal): reason for ordinal, reason in step.dropped.items()} or None,
        unit="prompt: reason",
        good="absent, or few apart from those without signal",
    ),
    "filtered_prompts": Metric(
        "training problems left out at the start because their prompts leave no room for an answer, by environment "
        "(absent if there are none)",
        lambda step: dict(step.left_out) or None,
        unit="problems by environment",
        good="absent, or few",
        advice="Raise `training.sequence_length`, or lower `sampling.max_new_tokens`.",
    ),
    "overdue_tokens": Metric(
        "tokens of answers dropped as overdue (async.on_overdue; absent if there are none)",
        lambda step: step.stats.batch.overdue_tokens or None,
        unit="tokens",
        good="absent",
        advice="Raise `async.max_lag`, or set `async.on_overdue` so that answers are kept.",
    ),
}
