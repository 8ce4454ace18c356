"""The record of a run: only registered names, only finite numbers, cut back at resume; sums over ranks."""

from __future__ import annotations

import json
import math
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rl.contract.attempt_records import MetricsLine, TimelineLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import Unreadable, read_lines
from megatron_rl.metrics import writer as writer_module
from megatron_rl.metrics.config import LoggingConfig
from megatron_rl.metrics.names import STEP_METRICS, check_name
from megatron_rl.metrics.report import rollout_metrics, update_metrics
from megatron_rl.metrics.tally import Tally
from megatron_rl.metrics.writer import MetricsWriter, NoMetrics, Writer, cut_back
from megatron_rl.training.optimizer import Update


def line(**metrics: Any) -> dict[str, Any]:
    return {"mean_reward": 0.5, "loss": 0.1, "grad_norm": 1.0, "throughput/tokens_per_s": 10.0, **metrics}


def lines(path: Path) -> list[MetricsLine]:
    found = read_lines(MetricsLine, path)
    assert not isinstance(found, Unreadable)
    return found.records


def writer(folder: Path, resumed_from: int = 0, evaluated: int = -1) -> MetricsWriter:
    run_dir = RunDir(folder)
    return MetricsWriter(
        run_dir, run_dir.attempt(1), LoggingConfig(samples_every=2, samples=1), resumed_from, evaluated
    )


# Names


def test_a_name_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'rewards' is not registered"):
        writer(tmp_path).step(1, line(rewards=1.0))
    assert lines(RunDir(tmp_path).metrics) == []


def test_every_registered_name_has_a_meaning() -> None:
    for name, meaning in STEP_METRICS.items():
        check_name(name)
        assert meaning
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
    cut_back(path, next_step=6)
    assert path.read_text() == "".join(json.dumps({"step": step}) + "\n" for step in range(1, 6))


def test_a_record_that_cannot_be_read_is_not_cut_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To take it for empty would be to lose it."""
    monkeypatch.setattr(writer_module, "PATIENCE_S", 0.0)
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(OSError, match="cannot be used"):
        cut_back(tmp_path / "metrics.jsonl", next_step=6)


def test_cutting_back_what_does_not_exist_makes_nothing(tmp_path: Path) -> None:
    cut_back(tmp_path / "metrics.jsonl", next_step=6)
    assert list(tmp_path.iterdir()) == []


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
    events = EventAccumulator(str(run_dir.tensorboard), size_guidance={"scalars": 0}).Reload().Scalars("mean_reward")
    assert [(event.step, event.value) for event in events] == [
        *((step, float(step)) for step in range(1, 5)),
        *((step, 10.0 * step) for step in range(5, 10)),
    ]


class View:
    """Stands in for the rollouts of a step."""

    def histograms(self) -> dict[str, list[float]]:
        return {"histograms/rewards": [0.0, 1.0], "histograms/group_means": []}

    def texts(self, limit: int) -> list[str]:
        return ["one group\n", "another\n"][:limit]


def test_samples_and_histograms_are_written_now_and_then(tmp_path: Path) -> None:
    record = writer(tmp_path)
    for step in (1, 2, 3):
        record.rollouts(step, View())
    record.close()
    assert RunDir(tmp_path).samples(2).read_text() == "one group\n"
    assert not RunDir(tmp_path).samples(3).exists()
    assert EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload().Tags()["histograms"] == ["histograms/rewards"]


def test_the_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record: Writer = NoMetrics()
    record.step(1, line())
    record.evaluation(1, {})
    record.rollouts(1, View())
    record.sync()
    record.close()
    assert list(tmp_path.iterdir()) == []


# Numbers


def test_a_tally_keeps_sums_maxima_and_minima_apart(groups: Any) -> None:
    tally = Tally()
    for value in (3.0, 1.0, 2.0):
        tally.add("sum", value)
        tally.maximum("largest", torch.tensor(value))
        tally.minimum("smallest", value)
    assert tally.reduce(groups.control) == {"sum": 6.0, "largest": 3.0, "smallest": 1.0}


def test_a_tally_sums_in_double_precision(groups: Any) -> None:
    tally = Tally()
    tally.add("sum", 2.0**40)
    tally.add("sum", 2.0**-10)
    assert tally.reduce(groups.control)["sum"] == 2.0**40 + 2.0**-10


ROLLOUTS = {
    "answers": 4,
    "groups": 2,
    "reward": 3.0,
    "reward_squared": 3.0,
    "signal": 1,
    "answer_tokens": 10,
    "answer_length_max": 4,
    "answer_length_min": 1,
    "prompt_tokens": 16,
    "truncated": 1,
    "staleness": 2,
    "staleness_max": 2,
    "failed": 1,
    "packed_tokens": 13,
}


def test_rollout_metrics_are_means_over_the_answers() -> None:
    metrics = rollout_metrics(ROLLOUTS)
    assert metrics["mean_reward"] == 0.75
    assert metrics["reward_std"] == pytest.approx(math.sqrt(3) / 4)
    assert metrics["nonzero_groups_ratio"] == 0.5
    assert metrics["answer_length"] == 2.5
    assert metrics["truncated_ratio"] == 0.25
    assert metrics["packed_tokens_ratio"] == 0.5
    assert metrics["failed_rollouts"] == 1


UPDATES = {
    "loss": 0.6,
    "entropy": 20.0,
    "sum/tokens": 10,
    "sum/clip_low": 1,
    "sum/clip_high": 2,
    "sum/ratio": 11.0,
    "max/ratio": 2.0,
    "sum/inference_difference": 0.1,
    "max/inference_difference": 0.05,
}


def test_update_metrics_leave_out_what_was_not_measured() -> None:
    metrics = update_metrics(UPDATES, [Update(1.0, 1e-3, True), Update(3.0, 2e-3, True)])
    assert metrics["loss"] == pytest.approx(0.3)
    assert metrics["grad_norm"] == 2.0
    assert metrics["learning_rate"] == 2e-3
    assert metrics["clip_fraction"] == pytest.approx(0.3)
    assert metrics["entropy"] == 2.0
    assert "kl" not in metrics
    assert update_metrics(UPDATES | {"sum/kl": 0.5}, [Update(1.0, 1e-3, True)])["kl"] == 0.05


def test_a_skipped_update_is_counted_and_has_no_gradient_norm() -> None:
    skipped = Update(math.nan, 1e-3, applied=False)
    assert update_metrics(UPDATES, [skipped, Update(3.0, 1e-3, True)])["grad_norm"] == 3.0
    assert update_metrics(UPDATES, [skipped, Update(3.0, 1e-3, True)])["skipped_updates"] == 1
    assert "grad_norm" not in update_metrics(UPDATES, [skipped])


def test_an_evaluation_says_how_it_was_asked(tmp_path: Path) -> None:
    record = writer(tmp_path)
    record.evaluation(3, {"eval/aime/greedy_accuracy": 0.5, "eval/prompt_format": "boxed"})
    record.close()
    (row,) = lines(RunDir(tmp_path).evaluations)
    assert row == MetricsLine(3, {"eval/aime/greedy_accuracy": 0.5, "eval/prompt_format": "boxed"})
    accumulator = EventAccumulator(str(RunDir(tmp_path).tensorboard)).Reload()
    assert accumulator.Tags()["scalars"] == ["eval/aime/greedy_accuracy"]


# A full disk


def test_the_record_waits_for_room_and_what_is_only_looked_at_is_left_out(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save that fills the disk gives the space back a moment later."""
    record = writer(small_disk)
    record.step(1, line())
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    threading.Timer(1.5, ballast.unlink).start()
    record.rollouts(2, View())
    record.timeline(TimelineLine(1.0, 2, {}))
    record.step(2, line(mean_reward=0.75, reward_std="x" * 5000))
    record.sync()
    record.close()
    assert [each.step for each in lines(RunDir(small_disk).metrics)] == [1, 2]
    assert "waits for room" in caplog.text
    assert "a sample of the rollouts is left out" in caplog.text


def test_a_record_that_cannot_be_written_for_another_reason_ends_the_run(tmp_path: Path) -> None:
    record = writer(tmp_path)
    RunDir(tmp_path).metrics.mkdir()
    with pytest.raises(IsADirectoryError):
        record.step(1, line())
