"""Every prompt of a run has one fate; records with conflicting or unreadable fates are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from exactly_once import NotExactlyOnce, fates

from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append


def step(number: int, first: int, beyond: int, **dropped: str) -> MetricsLine:
    values: dict[str, Any] = {"first_ordinal": first, "next_ordinal": beyond}
    if dropped:
        values["dropped_ordinals"] = {name[1:]: reason for name, reason in dropped.items()}
    return MetricsLine(number, values)


def run_of(folder, *lines: MetricsLine) -> RunDir:
    run = RunDir(folder)
    for line in lines:
        append(run.metrics, line)
    return run


def test_prompt_is_trained_on_in_its_step_or_dropped_for_a_reason(tmp_path):
    run = run_of(tmp_path, step(1, 0, 2), step(2, 2, 4, o3="too long"))
    assert fates(run) == {0: 1, 1: 1, 2: 2, 3: "too long"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([step(1, 0, 2), step(3, 2, 4)], "step 3 instead of step 2"),
        ([step(1, 0, 2), step(2, 1, 4)], "step 2 settles the prompts from 1 up to 4, the previous one ended at 2"),
        ([step(1, 0, 2, o2="too long")], r"step 1 drops \[2\], which it has not drawn"),
        ([MetricsLine(1, {})], "step 1 has no first_ordinal"),
        ([MetricsLine(1, {"first_ordinal": 0, "next_ordinal": 1, "dropped_ordinals": [3]})], "cannot be read"),
    ],
)
def test_record_with_conflicting_fates_is_rejected(tmp_path, lines, said):
    with pytest.raises(NotExactlyOnce, match=said):
        fates(run_of(tmp_path, *lines))


def test_unreadable_line_is_located(tmp_path):
    run = run_of(tmp_path, step(1, 0, 2))
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "first_or')
    with pytest.raises(NotExactlyOnce, match=r"metrics\.jsonl: line 2: is torn"):
        fates(run)


def test_unreadable_record_is_not_an_empty_one(tmp_path):
    run = RunDir(tmp_path)
    run.metrics.mkdir()
    with pytest.raises(NotExactlyOnce, match=r"metrics\.jsonl cannot be used: is not a regular file"):
        fates(run)
