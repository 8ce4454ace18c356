"""Prometheus's text file: Prometheus's own parser reads it, and it is whole at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from optional import needs

from megatron_rl.contract.paths import RunDir
from megatron_rl.rank.metrics import prometheus
from megatron_rl.rank.metrics.prometheus import PrometheusFile, text_of
from megatron_rl.rank.metrics.writer import MetricsWriter
from megatron_rl.recipe.logs import LoggingConfig

VALUES = {
    "mean_reward": 0.25,
    "time/step_s": 2,
    'reward/tool "calls"': 0.5,
    "environments/math/hard/mean_reward": 0.1,
    "environments/code/mean_reward": 0.2,
    "eval/held_out/greedy_accuracy": 0.75,
    "eval/prompt_format": "chat",
    "dropped_ordinals": {"3": "failed"},
}


@needs("prometheus_client")
def test_the_parser_of_prometheus_reads_names_labels_values_and_meanings() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    families = [*text_string_to_metric_families(text_of("my\nrun\\", 12, VALUES, 1e9))]
    samples = {(one.name, *sorted(one.labels.items())): one.value for family in families for one in family.samples}
    run = ("run", "my\nrun\\")
    assert samples == {
        ("mrl_step", run): 12,
        ("mrl_updated_timestamp_seconds", run): 1e9,
        ("mrl_mean_reward", run): 0.25,
        ("mrl_time_step_s", run): 2,
        ("mrl_reward_component", ("component", 'tool "calls"'), run): 0.5,
        ("mrl_environment_mean_reward", ("environment", "math/hard"), run): 0.1,
        ("mrl_environment_mean_reward", ("environment", "code"), run): 0.2,
        ("mrl_eval_greedy_accuracy", run, ("set", "held_out")): 0.75,
    }
    assert {family.type for family in families} == {"gauge"}
    assert next(one for one in families if one.name == "mrl_mean_reward").documentation.startswith("mean reward of")


def test_a_run_writes_the_file_at_most_every_few_seconds_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(prometheus.time, "monotonic", lambda: clock[0])
    file = PrometheusFile(RunDir(tmp_path / "r"), None)
    (tmp_path / "r").mkdir()
    file.add(1, {"loss": 0.5})
    file.add(2, {"loss": 0.25})
    assert 'mrl_step{run="r"} 1.0' in file.path.read_text()
    clock[0] += prometheus.EVERY_S
    file.add(2, {"eval/a/greedy_accuracy": 0.5})
    assert file.path == tmp_path / "r" / "metrics.prom"
    assert 'mrl_loss{run="r"} 0.25' in file.path.read_text()
    file.add(3, {"kl": 0.1})
    file.close()
    assert [line.split("{")[0] for line in file.path.read_text().splitlines() if line[0] != "#"][2:] == [
        "mrl_eval_greedy_accuracy",  # the newest evaluation stays; a metric that a step lacks does not
        "mrl_kl",
    ]


@pytest.mark.parametrize(("given", "path"), [("x/my.prom", "x/my.prom"), ("x", "x/mrl-r.prom")])
def test_the_key_names_a_file_or_the_folder_of_node_exporter(tmp_path: Path, given: str, path: str) -> None:
    assert PrometheusFile(RunDir(tmp_path / "r"), str(tmp_path / given)).path == tmp_path / path


def test_a_file_that_cannot_be_written_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir(tmp_path)
    record = MetricsWriter(run, run.attempt(1), LoggingConfig(prometheus=str(tmp_path / "no" / "folder")), 0, -1)
    record.step(1, {"loss": 0.5, "throughput/tokens_per_s": 1.0})
    record.close()
    assert "Prometheus's file is left out" in caplog.text
    assert run.metrics.exists()
