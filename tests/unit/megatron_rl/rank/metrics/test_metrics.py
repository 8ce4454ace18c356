"""The record of a run: registered names, finite numbers, cut back at resume; sums over ranks."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.contract import files, metrics_index, time_total
from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine, TimeTotal
from megatron_rl.contract.metrics_index import look_up
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import PATIENCE_S, Lines, Unreadable, append, read_lines
from megatron_rl.rank.metrics.cut_back import cut_back
from megatron_rl.rank.metrics.metric import StepReport
from megatron_rl.rank.metrics.names import STEP_METRICS, TIMED, check_name, metrics_of
from megatron_rl.rank.metrics.report import MOST_REASONS, AllAnswersLost, step_lines
from megatron_rl.rank.metrics.stats import (
    BatchStats,
    DeviceStats,
    EnvironmentStats,
    LossStats,
    Reduction,
    StepStats,
    Tally,
    UpdateStats,
    combined,
    reductions,
)
from megatron_rl.rank.metrics.timeline import Timeline
from megatron_rl.rank.metrics.trackers.event_files import EventFiles
from megatron_rl.rank.metrics.trackers.record_rows import RecordRow
from megatron_rl.rank.metrics.writer import MetricsWriter
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.logs import LoggingConfig


def line(**metrics: Any) -> dict[str, Any]:
    return {"mean_reward": 0.5, "loss": 0.1, "grad_norm": 1.0, "throughput/tokens_per_s": 10.0, **metrics}


def lines(path: Path) -> list[MetricsLine]:
    found = read_lines(MetricsLine, path)
    assert not isinstance(found, Unreadable)
    return found.records


def writer(folder: Path, resumed_from: int = 0, evaluated: int = -1) -> MetricsWriter:
    run_dir = RunDir(folder)
    return MetricsWriter(run_dir, run_dir.attempt(1), LoggingConfig(), resumed_from, evaluated)


# Names


def test_a_name_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'rewards' is not registered"):
        writer(tmp_path).step(1, line(rewards=1.0))
    assert lines(RunDir(tmp_path).metrics) == []


def test_every_registered_name_has_a_meaning() -> None:
    for name, metric in STEP_METRICS.items():
        check_name(name)
        assert metric.meaning
        assert "/" not in name or name.startswith(("time/", "throughput/", "system/"))


# Files


def test_a_number_that_is_not_finite_is_absent(tmp_path: Path) -> None:
    record = writer(tmp_path)
    record.step(1, line(loss=math.nan, grad_norm=math.inf, kl=0.0, skipped_updates=1))
    record.close()
    (written,) = lines(RunDir(tmp_path).metrics)
    assert written.values.keys() == {"mean_reward", "throughput/tokens_per_s", "kl", "skipped_updates"}
    assert "NaN" not in RunDir(tmp_path).metrics.read_text()
    tags = EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload().Tags()["scalars"]
    assert "loss" not in tags
    assert "kl" in tags


def test_a_record_is_cut_back_to_the_checkpoint_and_its_torn_line_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, 8)) + '{"step": 8, "lo')
    cut_back(path, last_step=5)
    assert path.read_text() == "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))


@pytest.mark.parametrize("damage", [slice(None), slice(100, 110)], ids=["all of it", "the end of the kept part"])
def test_a_record_that_shows_garbage_is_not_cut_back(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "metrics.jsonl"
    good = "".join(json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(1, 6)).encode()
    path.write_bytes(good[: damage.start or 0] + bytes(len(good[damage])) + good[damage][:0])
    before = path.read_bytes()
    with pytest.raises(OSError, match=r"metrics.jsonl: line \d is torn or not JSON .*, and that of step 5 is missing"):
        cut_back(path, last_step=5)
    assert path.read_bytes() == before


def test_the_torn_line_of_an_evaluation_that_went_on_beside_training_is_dropped(tmp_path: Path) -> None:
    path = RunDir(tmp_path).evaluations
    whole = json.dumps({"step": 0, "eval/trained/greedy_accuracy": 0.0}) + "\n"
    path.write_text(whole + '{"step": 4, "ev')
    with pytest.raises(OSError, match=r"line 2 .*, and that of step 4 is missing"):
        cut_back(path, last_step=4)
    append(RunDir(tmp_path).metrics, MetricsLine(6, {"loss": 0.5}))
    MetricsWriter(RunDir(tmp_path), RunDir(tmp_path).attempt(1), LoggingConfig(), 6, 4, recorded=False).close()
    assert path.read_text() == whole


@pytest.mark.parametrize("recorded", [0, 3, 9])
def test_a_record_without_the_step_to_resume_from_is_not_continued(tmp_path: Path, recorded: int) -> None:
    """The file belongs to another line of training, or somebody has removed it: the next lines would leave a gap."""
    run = RunDir(tmp_path)
    for step in range(1, recorded + 1):
        if step != 5:
            append(run.metrics, MetricsLine(step, {"loss": 0.5}))
    before = run.metrics.read_bytes() if recorded else None
    with pytest.raises(OSError, match=r"metrics.jsonl: the line of step 5 is missing, although the checkpoint"):
        writer(tmp_path, resumed_from=5)
    assert run.metrics.exists() == (before is not None)
    assert before is None or run.metrics.read_bytes() == before


def test_an_evaluation_before_the_first_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    path.write_bytes(bytes(30))
    with pytest.raises(OSError, match="that of step 0 is missing"):
        cut_back(path, last_step=0)
    cut_back(path, last_step=None)
    assert path.read_bytes() == b"", "nothing is kept, so garbage loses nothing"


def test_a_resumed_record_has_no_gaps_and_no_repeats(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.evaluation(0, {"eval/trained/greedy_accuracy": 0.0})
    for step in range(1, 8):
        first.step(step, line(mean_reward=float(step)))
    first.evaluation(6, {"eval/trained/greedy_accuracy": 0.6})
    first.close()
    second = writer(tmp_path, resumed_from=4, evaluated=0)
    for step in range(5, 10):
        second.step(step, line(mean_reward=10.0 * step))
    second.close()
    run_dir = RunDir(tmp_path)
    assert [each.step for each in lines(run_dir.metrics)] == list(range(1, 10))
    assert [each.step for each in lines(run_dir.evaluations)] == [0]
    shown = EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0}).Reload().Scalars("mean_reward")
    assert [(event.step, event.value) for event in shown] == [
        *((step, float(step)) for step in range(1, 5)),
        *((step, 10.0 * step) for step in range(5, 10)),
    ]


def test_tensorboard_shows_steps_after_a_kill_that_the_next_attempt_does_not_repeat(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append(run_dir.evaluations, MetricsLine(0, {"eval/trained/greedy_accuracy": 0.25}))
    append(run_dir.metrics, MetricsLine(1, line(loss=1.0)))
    killed = EventFiles(run_dir, last_step=0)
    killed.log([RecordRow(0, None, {"eval/trained/greedy_accuracy": 0.25}), RecordRow(1, None, {"loss": 1.0})])
    append(run_dir.metrics, MetricsLine(2, line(loss=2.0)))
    append(run_dir.metrics, MetricsLine(3, line(loss=3.0)))
    second = writer(tmp_path, resumed_from=2, evaluated=0)
    second.step(3, line(loss=30.0))
    second.close()
    shown = EventAccumulator(str(run_dir.tensorboard)).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [event.step for event in shown.Scalars("eval/trained/greedy_accuracy")] == [0]


def test_tensorboard_shows_an_evaluation_beside_training_that_the_next_attempt_repeats(tmp_path: Path) -> None:
    first = writer(tmp_path)
    first.evaluation(0, {"eval/trained/greedy_accuracy": 0.0})
    for step in range(1, 6):
        first.step(step, line(loss=float(step)))
    first.close()
    second = writer(tmp_path, resumed_from=5, evaluated=3)
    second.evaluation(3, {"eval/trained/greedy_accuracy": 0.5})
    second.close()
    writer(tmp_path, resumed_from=5, evaluated=3).close()
    shown = EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    assert [(event.step, event.value) for event in shown.Scalars("eval/trained/greedy_accuracy")] == [
        (0, 0.0),
        (3, 0.5),
    ]
    assert [event.step for event in shown.Scalars("loss")] == [1, 2, 3, 4, 5]


def test_a_warning_is_logged_when_it_begins_and_not_again_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = writer(tmp_path)
    for step in range(1, 6):
        first.step(step, line(truncated_ratio=0.98))
    first.close()
    (warned,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert warned.startswith("truncated: 98% of the answers of the last 3 steps were cut")
    caplog.clear()
    second = writer(tmp_path, resumed_from=4)
    second.step(5, line(truncated_ratio=0.98, learning_rate=1e30))
    second.close()
    (warned,) = (each.message for each in caplog.records if each.levelname == "WARNING")
    assert warned.startswith("learning-rate: ")


# Numbers


def test_a_tally_keeps_every_digit_of_a_double(groups: Any) -> None:
    tally = Tally()
    tally.put("sum", Reduction.SUM, 2.0**40 + 2.0**-10)
    tally.put("largest", Reduction.MAX, torch.tensor(3.0))
    assert tally.reduce(groups.control).total == {"sum": 2.0**40 + 2.0**-10, "largest": 3.0}


BATCH = BatchStats(
    **dict.fromkeys((each.name for each in fields(BatchStats)), 0)
    | {"answers": 4, "groups": 2, "groups_with_signal": 1, "reward": 3.0, "reward_squared": 3.0, "right": 3}
    | {"answer_tokens": 10, "answer_length_max": 4, "answer_length_min": 1, "prompt_tokens": 16, "packed_tokens": 13}
    | {"unpacked_tokens": 20, "sequences": 4, "turns": 4, "truncated": 1, "failed": 1}
    | {"staleness": 2, "staleness_max": 2}
)
LOSS = LossStats(
    loss=0.6,
    tokens=10,
    nonfinite=0,
    entropy=20.0,
    ratio=11.0,
    ratio_max=2.0,
    clip_low=1,
    clip_high=2,
    inference_difference=0.1,
    inference_difference_max=0.05,
    kl=None,
    importance_weight=None,
)
UPDATE = UpdateStats(updates=2, applied=2, grad_norm=4.0, learning_rate=2e-3, offloaded=0)

DEVICE = DeviceStats(peak_memory=3 * 2**29, power=1200.0, powers=2, flops=2e12, peak_flops=4e12)


def metrics(
    loss: LossStats | None = LOSS, update: UpdateStats = UPDATE, device: DeviceStats | None = None
) -> dict[str, Any]:
    """Metrics of a step with these statistics."""
    one = StepReport(3, StepStats(BATCH, loss, update, device), 1, 8, 10, 4, dropped={}, failures={"timeout": 1})
    return metrics_of(replace(one, ranks=2, seconds=dict.fromkeys(TIMED, 0.5)))


def test_batch_metrics_are_means_over_the_answers() -> None:
    found = metrics()
    assert found["mean_reward"] == 0.75
    assert found["right_ratio"] == 0.75
    assert found["reward_std"] == pytest.approx(math.sqrt(3) / 4)
    assert found["nonzero_groups_ratio"] == 0.5
    assert found["answer_length"] == 2.5
    assert found["truncated_ratio"] == 0.25
    assert found["packed_tokens_ratio"] == 13 / 20
    assert found["failed_rollouts"] == 1
    assert found["failed_rollouts_by_reason"] == {"timeout": 1}
    assert (found["first_ordinal"], found["next_ordinal"], found["policy_version"]) == (8, 10, 4)


def test_loss_metrics_are_means_over_the_trained_tokens_and_absent_if_not_measured() -> None:
    found = metrics()
    assert found["loss"] == pytest.approx(0.3)
    assert found["grad_norm"] == 2.0
    assert found["learning_rate"] == 2e-3
    assert found["clip_fraction"] == pytest.approx(0.3)
    assert found["entropy"] == 2.0
    assert not {"kl", "importance_weight", "dropped_ordinals"} & found.keys()
    assert metrics(replace(LOSS, kl=0.5))["kl"] == 0.05
    for nothing in (metrics(None), metrics(replace(LOSS, tokens=0))):
        assert not {"entropy", "clip_fraction", "importance_ratio_max"} & nothing.keys()


def test_a_skipped_update_is_counted_and_has_no_gradient_norm() -> None:
    one_skipped = metrics(update=replace(UPDATE, applied=1, grad_norm=3.0))
    assert (one_skipped["grad_norm"], one_skipped["skipped_updates"]) == (3.0, 1)
    assert "grad_norm" not in metrics(update=replace(UPDATE, applied=0, grad_norm=0))


def test_seconds_and_throughput_follow_the_phases_of_a_step() -> None:
    found = metrics(update=replace(UPDATE, offloaded=64))
    assert found["time/step_s"] == 3.5
    assert {found[f"time/{phase.replace('-', '_')}_s"] for phase in TIMED} == {0.5}
    assert found["throughput/tokens_per_s"] == pytest.approx(10 / 3.5)
    assert found["throughput/tokens_per_s_per_rank"] == pytest.approx(10 / 3.5 / 2)
    assert found["throughput/generated_tokens_per_s"] == 20.0


def test_device_metrics_are_peak_memory_mean_power_and_the_share_of_the_summed_peaks() -> None:
    found = metrics(device=DEVICE)
    assert (found["system/peak_memory_gib"], found["system/power_w"]) == (1.5, 600.0)
    assert found["throughput/mfu"] == 2e12 / (0.5 * 2 * 4e12)


def test_metrics_of_what_is_not_measured_are_absent() -> None:
    names = {"system/peak_memory_gib", "system/power_w", "throughput/mfu"}
    others = {"nonfinite_tokens", "time/offload_s", "system/offloaded_bytes"}
    assert not (names | others) & metrics().keys()
    assert metrics(update=replace(UPDATE, offloaded=64))["system/offloaded_bytes"] == 64
    assert metrics(replace(LOSS, tokens=0, nonfinite=7))["nonfinite_tokens"] == 7
    silent = metrics(device=replace(DEVICE, powers=0, peak_flops=0.0))
    assert names & silent.keys() == {"system/peak_memory_gib"}


def test_every_field_of_the_statistics_declares_its_reduction(groups: Any) -> None:
    stats = StepStats(BATCH, LOSS, UPDATE, DEVICE)
    tally = Tally()
    stats.put(tally)
    total = tally.reduce(groups.control).total
    parts = (BATCH, LOSS, UPDATE, DEVICE)
    assert len(total) == sum(getattr(part, each.name) is not None for part in parts for each in fields(part))
    assert stats.reduced(total) == stats
    assert {name for name, reduction in reductions(LossStats).items() if reduction is Reduction.MAX} == {
        "ratio_max",
        "inference_difference_max",
    }


LOST = replace(BATCH, answers=0, groups=0, groups_with_signal=0, reward=0.0, failed=0, dropped=0)


def report(batch: BatchStats, dropped: dict[int, str], failures: dict[str, int]) -> StepReport:
    return StepReport(3, StepStats(batch, LOSS, UPDATE, None), 1, 8, 10, 4, dropped, failures)


@pytest.mark.parametrize(
    ("counted", "name", "value"),
    [
        ({}, "turns_mean", None),
        ({"turns": 6}, "turns_mean", 1.5),
        ({}, "tool_calls_mean", None),
        ({"with_tools": 2, "tool_calls": 5}, "tool_calls_mean", 2.5),
        ({}, "branches_mean", None),
        ({"sequences": 6}, "branches_mean", 1.5),
        ({}, "undecided_answers", None),
        ({"undecided": 3}, "undecided_answers", 3),
    ],
)
def test_counts_of_what_most_runs_lack_are_absent_without_it(counted: dict[str, int], name: str, value: Any) -> None:
    one = report(replace(BATCH, **counted), {}, {})
    assert metrics_of(replace(one, seconds=dict.fromkeys(TIMED, 1.0))).get(name) == value


def line_of(one: StepReport, groups: Any) -> dict[str, Any]:
    """Line of a step that took some time."""
    timeline = Timeline()
    with timeline.phase("train"):
        time.sleep(0.01)
    return step_lines(one, timeline, groups.control)[0]


def test_an_environment_has_the_means_over_its_trained_tokens_as_far_as_its_algorithm_has_them(groups: Any) -> None:
    sums = EnvironmentStats(4, 1, 1, 2.0, 0, tokens=8.0, entropy=4.0, clipped=2.0, kl=None)
    silent = EnvironmentStats(4, 1, 0, 4.0, 0, tokens=0.0, entropy=0.0, clipped=None, kl=0.0)
    one = report(BATCH, {}, {})
    one = replace(one, stats=replace(one.stats, environments={"sums": sums, "silent": silent}))
    found = {name: value for name, value in line_of(one, groups).items() if name.startswith("environments/")}
    assert (found["environments/sums/entropy"], found["environments/sums/clip_fraction"]) == (0.5, 0.25)
    of_loss = {name for name in found if name.rpartition("/")[2] in ("entropy", "clip_fraction", "kl")}
    assert of_loss == {"environments/sums/entropy", "environments/sums/clip_fraction"}


def test_statistics_of_losses_without_a_value_do_not_hide_it_in_others() -> None:
    first, second = (replace(LOSS, **{name: torch.tensor(float(value)) for name, value in _given(LOSS)}) for _ in "12")
    both = combined([replace(first, kl=torch.tensor(3.0)), second])
    assert both.kl == 3.0 and both.tokens == 2 * first.tokens and both.rejected is None


def _given(stats: LossStats) -> list[tuple[str, Any]]:
    return [(field.name, value) for field in fields(stats) if (value := getattr(stats, field.name)) is not None]


def test_reward_components_are_means_over_the_answers_that_have_them(groups: Any) -> None:
    one = replace(report(replace(BATCH, with_components=3), {}, {}), components={"short": (1.5, 3), "right": (1.0, 2)})
    assert {name: value for name, value in line_of(one, groups).items() if name.startswith("reward/")} == {
        "reward/right": 0.5,
        "reward/short": 0.5,
    }


def test_lost_and_dropped_answers_of_all_ranks_are_in_the_line(groups: Any) -> None:
    dropped, failures = {9: "prompt too long"}, {"timeout": 1}
    found = line_of(report(replace(BATCH, dropped=1), dropped, failures), groups)
    assert found["dropped_ordinals"] == {"9": "prompt too long"}
    assert found["failed_rollouts_by_reason"] == failures


def test_the_number_of_reasons_in_a_line_is_limited(groups: Any) -> None:
    failures = {"timeout": 9} | {f"could not convert {answer}": 1 for answer in range(2 * MOST_REASONS)}
    reasons = line_of(report(replace(BATCH, failed=49), {}, failures), groups)["failed_rollouts_by_reason"]
    assert len(reasons) == MOST_REASONS + 1 and sum(reasons.values()) == sum(failures.values())
    assert (reasons["timeout"], reasons["other reasons"]) == (9, MOST_REASONS + 1)


@pytest.mark.parametrize(
    ("batch", "dropped", "failures", "error", "message"),
    [
        (replace(LOST, failed=8), {}, {"timeout": 8}, AllAnswersLost, "no answer of step 3 .*timeout"),
        (
            replace(LOST, dropped=2),
            {8: "prompt too long", 9: "prompt too long"},
            {},
            ConfigurationError,
            "prompts 8 to 9, all of step 3, are too long",
        ),
    ],
)
def test_a_step_without_answers_ends_the_run(
    groups: Any, batch: BatchStats, dropped: Any, failures: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        step_lines(report(batch, dropped, failures), Timeline(), groups.control)


def test_all_answers_lost_has_the_traceback_of_the_most_frequent_reason(groups: Any) -> None:
    failures = {"get_reward at mine.py:6: KeyError: 'a'": 5, "get_reward at mine.py:6: KeyError: 'b'": 2, "timeout": 1}
    lost = report(replace(LOST, failed=8), {}, failures)
    lost = replace(lost, tracebacks={"get_reward at mine.py:6: KeyError": "Traceback of line 6\n"})
    with pytest.raises(
        AllAnswersLost, match=r"could be scored: 5 x get_reward at mine.py:6: KeyError: 'a', 2 x"
    ) as error:
        step_lines(lost, Timeline(), groups.control)
    assert error.value.trace == "Traceback of line 6\n"


def test_text_of_an_evaluation_is_in_the_record_but_not_in_tensorboard(tmp_path: Path) -> None:
    record = writer(tmp_path)
    record.evaluation(3, {"eval/aime/greedy_accuracy": 0.5, "eval/prompt_format": "boxed"})
    record.close()
    (row,) = lines(RunDir(tmp_path).evaluations)
    assert row == MetricsLine(3, {"eval/aime/greedy_accuracy": 0.5, "eval/prompt_format": "boxed"})
    accumulator = EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    assert accumulator.Tags()["scalars"] == ["eval/aime/greedy_accuracy"]


def test_readers_of_a_long_record_begin_at_its_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_index, "EVERY", 10)
    run = RunDir(tmp_path)
    run.attempt(1).folder.mkdir(parents=True)
    record = writer(tmp_path)
    record.timeline(TimelineLine(1.0, 0, {}, began=0.0, ranks=2, resumed=0))
    for step in range(1, time_total.EVERY):
        record.step(step, line())
        record.timeline(TimelineLine(1.0 + step, step, {"train": 2.0}))
    record.close()
    timeline = read_lines(TimelineLine, run.attempt(1).timeline)
    assert isinstance(timeline, Lines)
    assert [one.total for one in timeline.records if one.total] == [TimeTotal({"train": 255.0}, 255.0, 1.0)]
    assert look_up(run).summary.step == 250
    writer(tmp_path, resumed_from=33).close()
    assert (look_up(run).summary.step, lines(run.metrics)[-1].step) == (30, 33)


# A full disk


def test_the_record_waits_for_room_and_optional_files_are_left_out(
    small_disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fills the disk frees its space while the record waits."""
    record = writer(small_disk)
    record.step(1, line())
    RunDir(small_disk).attempt(1).folder.mkdir(parents=True)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if sum(slept) > PATIENCE_S:
            ballast.unlink()

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep))
    record.timeline(TimelineLine(1.0, 2, {}))
    record.step(2, line(mean_reward=0.75, reward_std="x" * 5000))
    record.sync()
    record.close()
    assert [each.step for each in lines(RunDir(small_disk).metrics)] == [1, 2]
    assert "metrics.jsonl cannot be written for now: No space left" in caplog.text
    assert "the timeline is left out: [Errno 28]" in caplog.text


def test_a_record_that_cannot_be_written_for_another_reason_ends_the_run(tmp_path: Path) -> None:
    record = writer(tmp_path)
    RunDir(tmp_path).metrics.mkdir()
    with pytest.raises(IsADirectoryError):
        record.step(1, line())
