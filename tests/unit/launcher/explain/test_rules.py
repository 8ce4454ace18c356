"""Rules of `mrl explain`: each finds its own fault, and a run that learns has no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.explain.explanation import OF_RECORD, findings
from launcher.explain.group_facts import Formats, GroupFacts
from launcher.explain.record import Record
from launcher.runs.slow_ranks import SlowRank
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.learning import Hindrance
from megatron_rl.contract.run_records import LessonRecord, PromptCounts, RightAnswer

RECIPE = {
    "model": {"dtype": "bf16"},
    "grpo": {"policy_loss": "clip", "importance": None},
    "training": {"steps": 100},
}
STEPS = 60


def line(step: int, reward: float, **values: Any) -> MetricsLine:
    of_a_step = {
        "mean_reward": reward + 0.02 * (-1) ** step,
        "right_ratio": reward,
        "nonzero_groups_ratio": 0.7,
        "entropy": 0.8,
        "clip_fraction": 0.05,
        "inference_logprob_difference": 0.01,
        "staleness_mean": 0.0,
        "learning_rate": 1e-6,
        "policy_version": step,
        "reward/right": reward,
    }
    return MetricsLine(step, {**of_a_step, **values})


def run(
    *, reward: tuple[float, float] = (0.2, 0.6), steps: int = STEPS, recipe: dict[str, Any] | None = None, **late: Any
) -> Record:
    """A run whose reward goes from one value to another, with these values in the second half of its steps."""
    low, high = reward
    lines = [
        line(step, low + (high - low) * step / steps, **(late if step > steps / 2 else {}))
        for step in range(1, steps + 1)
    ]
    return Record(recipe or RECIPE, lines)


def evaluated(*accuracies: tuple[float, float]) -> list[MetricsLine]:
    """Evaluations with these accuracies on trained and held-out problems."""
    names = "eval/trained/greedy_accuracy", "eval/held_out/greedy_accuracy"
    return [MetricsLine(step, dict(zip(names, pair, strict=True))) for step, pair in enumerate(accuracies)]


def rows_trained_on(first: float, last: float) -> list[MetricsLine]:
    """Steps of supervised training whose loss goes from one value to another."""
    return [MetricsLine(step, {"loss": first + (last - first) * step / STEPS}) for step in range(1, STEPS + 1)]


def held_out_losses(*losses: float) -> list[MetricsLine]:
    steps = range(0, STEPS + 1, STEPS // (len(losses) - 1))
    return [MetricsLine(step, {"eval/held_out_rows/loss": loss}) for step, loss in zip(steps, losses, strict=True)]


def with_grpo(**keys: Any) -> dict[str, Any]:
    return {**RECIPE, "grpo": {**RECIPE["grpo"], **keys}}


def with_prompts(**counts: int) -> Record:
    usual = {"prompts": 1000, "distinct": 990, "empty": 0, "longest": 900}
    return replace(
        run(),
        lesson=LessonRecord(PromptCounts(**{**usual, "at_longest": 1, "lengths": 300, "at_another": 9, **counts})),
    )


def with_right(*rewards: float | None, why: str = "") -> Record:
    right = [RightAnswer("2+2=", "4", reward, why) for reward in rewards]
    return replace(with_prompts(), lesson=LessonRecord(with_prompts().lesson.prompts, right))


def names(record: Record) -> list[str]:
    return [one.name for one in findings(record)]


GOOD = {
    "a run whose reward rises": run(),
    "a solved problem": run(reward=(0.3, 0.97), entropy=0.02, nonzero_groups_ratio=0.03),
    "a loss that clips whole sequences": run(recipe=with_grpo(policy_loss="gspo"), clip_fraction=0.6),
    "answers of older weights": run(staleness_mean=1.0, inference_logprob_difference=0.2),
    "a vLLM with weights of 8 bits": run(
        recipe={**RECIPE, "inference": {"vllm": {"args": {"quantization": "fp8"}}}}, inference_logprob_difference=0.15
    ),
    "old answers that each environment corrects": run(
        recipe={
            **RECIPE,
            "environments": [
                {"id": "a", "grpo": {"rejection": {"upper": 2.0}}},
                {"id": "b", "evaluation_only": True, "grpo": None},
            ],
        },
        staleness_mean=6.0,
    ),
    "old answers with a correction": run(recipe=with_grpo(importance={"upper": 2.0}), staleness_mean=6.0),
    "a small learning rate in fp32": run(recipe={**RECIPE, "model": {"dtype": "fp32"}}, learning_rate=1e-9),
    "a run without an update yet": Record(RECIPE, []),
    "few answers without their format": replace(
        run(), formats=Formats(requested=100, missing=20, format="####", offered=100, unparsed=5)
    ),
    "a handful of answers": replace(run(), formats=Formats(requested=8, missing=8, format="####")),
    "prompts of which a few repeat others": with_prompts(distinct=700),
    "sums, of which most have the largest number of digits": with_prompts(longest=5, at_longest=800, lengths=3),
    "long prompts of which a few are equally long": with_prompts(longest=2048, at_longest=4, at_another=3),
    "a natural prompt that all others contain": with_prompts(empty=1),
    "right answers that earn 1, and one that was lost": with_right(1.0, 1.0, None),
    "few right answers without their format": replace(run(), facts=GroupFacts(missed=100, unrewarded=9)),
    "a handful of answers without their format": replace(run(), facts=GroupFacts(missed=20, unrewarded=20)),
    "rewards that follow the length loosely": replace(
        run(), facts=GroupFacts(scored=640, by_length=0.6, advantages=640, correlation=0.4)
    ),
    "rows of one label each": replace(run(), facts=GroupFacts(learned=200, ends=100, rows=100)),
    "supervised training": Record(
        {**RECIPE, "grpo": None}, [MetricsLine(step, {"loss": 1.0}) for step in range(1, 80)]
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_found_in(name):
    assert findings(GOOD[name]) == []


FAULTY = {
    "reward-not-above-start": (run(reward=(0.3, 0.3)), "of the last 15 of 60 steps is 0.301, and was 0.299"),
    "reward-fell": (
        Record(RECIPE, [*run(reward=(0.2, 0.8)).lines, *(line(60 + step, 0.4) for step in range(1, 20))]),
        "from 0.755, its best, reached at step 60, to 0.4",
    ),
    "signal-fading": (run(nonzero_groups_ratio=0.1), "from 70% to 10%, while 43% of the answers are still wrong"),
    "entropy-collapse": (run(entropy=0.05, nonzero_groups_ratio=0.3), "fell from 0.8 to 0.05 nats"),
    "clipped": (run(clip_fraction=0.45), "policy loss (clip) removed the gradient of 45%"),
    "engine-mismatch": (run(inference_logprob_difference=0.3), "differ by 0.3 nats"),
    "stale": (
        run(
            recipe={
                **with_grpo(importance={"upper": 2.0}),
                "environments": [{"id": "a", "grpo": None}, {"id": "b", "grpo": {"importance": None}}],
            },
            staleness_mean=6.0,
        ),
        "sampled 6.0 optimizer steps before",
    ),
    "learning-rate-below-bf16": (
        Record(RECIPE, [line(step, 0.2 + step / 200, learning_rate=1e-7) for step in range(1, STEPS + 1)]),
        "All 100 steps together move a weight by 1e-05 at most",
    ),
    "memorised": (
        Record(RECIPE, run().lines, evaluated((0.3, 0.3), (0.6, 0.5), (0.95, 0.4))),
        "0.95 on trained problems and 0.40 on held-out ones, where it was 0.50",
    ),
    "held-out-loss-rose": (
        Record(RECIPE, rows_trained_on(2.0, 0.1), held_out_losses(2.1, 1.5, 1.6)),
        "was 1.5 after step 30, its best, and is 1.6 after step 60",
    ),
    "component-never-earned": (
        Record(RECIPE, [each._replace(values={**each.values, "reward/format": 0.0}) for each in run().lines]),
        "of the component format of the reward",
    ),
    "format-missing": (
        replace(run(), formats=Formats(requested=100, missing=40, format="<answer>")),
        "40 of 100 recorded answers of the newest steps, cut ones left out, do not have the format",
    ),
    "calls-do-not-parse": (
        replace(run(), formats=Formats(offered=100, unparsed=15)),
        "15 of 100 recorded answers of the newest steps begin a tool call",
    ),
    "prompts-equal": (with_prompts(prompts=100, distinct=1), "The first 100 prompts have 1 different texts"),
    "prompts-empty": (with_prompts(empty=30), "30 of the first 1,000 prompts say nothing"),
    "prompts-cut": (
        with_prompts(longest=2048, at_longest=40, lengths=500, at_another=6),
        "40 of 990 different prompts have exactly 2,048 characters, the largest number, and at most 6 any other",
    ),
    "right-answer-below-1": (
        with_right(1.0, 0.0, 0.9),
        'less than 1 for 2 of the first 3 problems: "4" to "2+2=" earned 0 before the first step',
    ),
    "right-answers-unrewarded": (
        replace(run(), facts=GroupFacts(missed=100, unrewarded=12, example="so it is 4")),
        "12 of 100 recorded answers of the newest steps that earned less than 1, cut ones left out, end with the right "
        'answer of the data, such as "so it is 4"',
    ),
    "reward-by-length": (
        replace(run(), facts=GroupFacts(scored=640, by_length=0.99, advantages=640, correlation=0.9)),
        "explains 99% of the variance of the rewards of 640 answers",
    ),
    "advantage-by-length": (
        replace(run(), facts=GroupFacts(scored=640, by_length=0.3, advantages=640, correlation=-0.6)),
        "have a correlation of -0.60 within their groups: the policy is taught shorter answers",
    ),
    "learned-ends": (
        replace(run(), facts=GroupFacts(learned=10, ends=8, rows=8)),
        "8 of the 10 learned tokens of 8 recorded rows only end something",
    ),
    "slow-rank": (
        replace(run(), slow_ranks=[SlowRank("train", 3, "node05", 19, 20, 0.2)]),
        "Rank 3 on node05 was slowest in train in 19 of 20 steps, for 20% of their time",
    ),
}


def test_a_held_out_loss_that_rises_with_that_of_the_rows_trained_on_is_no_memorising():
    losses = held_out_losses(2.1, 1.5, 1.6)
    assert not findings(Record(RECIPE, rows_trained_on(1.0, 1.5), losses))
    assert not findings(Record(RECIPE, rows_trained_on(2.0, 0.1), held_out_losses(2.1, 1.5, 1.55)))


def test_every_rule_has_a_faulty_record_here():
    assert FAULTY.keys() == OF_RECORD.keys()


@pytest.mark.parametrize("name", FAULTY)
def test_rule_finds_its_fault_and_no_other_does(name):
    record, evidence = FAULTY[name]
    assert names(record) == [name]
    assert evidence in findings(record)[0].seen


def test_several_updates_a_step_move_weights_further():
    twenty_updates = [
        line(step, 0.2 + step / 200, learning_rate=1e-7, policy_version=20 * step) for step in range(1, 61)
    ]
    assert names(Record(RECIPE, twenty_updates)) == []


def test_warnings_of_the_run_come_first_with_their_step():
    warning = Hindrance("truncated", 12, "60% of the answers were cut", "Raise sampling.max_new_tokens.")
    found = findings(Record(RECIPE, run(clip_fraction=0.45).lines, warnings=[warning]))
    assert [(one.name, one.since) for one in found] == [("truncated", 12), ("clipped", None)]


def test_names_of_a_task_cannot_control_the_terminal():
    hostile = [each._replace(values={**each.values, "reward/\x1b[2J\nx": 0.0}) for each in run().lines]
    (found,) = findings(Record(RECIPE, hostile))
    assert "\\x1b[2J\\nx" in found.seen and found.seen.isprintable()


def test_a_key_of_another_type_or_below_something_that_is_no_section_is_absent():
    assert Record({"model": 3}, []).key("model.dtype", str) is None
    assert Record({"model": {"dtype": 3}}, []).key("model.dtype", str) is None


def test_right_answers_that_cannot_be_scored_are_a_finding_if_they_are_half():
    (found,) = findings(with_right(None, None, 1.0, why="get_reward: KeyError: 'solution'"))
    assert "could not be scored for 2 of the first 3 problems: get_reward: KeyError" in found.seen


def test_a_run_of_many_steps_is_not_judged_by_a_flat_beginning():
    long = {**RECIPE, "training": {"steps": 900}}
    assert names(run(reward=(0.3, 0.3), steps=101, recipe=long)) == []
    short = {**RECIPE, "training": {"steps": 200}}
    assert names(run(reward=(0.3, 0.3), steps=101, recipe=short)) == ["reward-not-above-start"]
