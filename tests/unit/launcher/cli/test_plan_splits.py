"""mrl plan: how long a step takes on each split of the nodes, estimated or as a run measured it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from launcher.cli.arguments import Lags
from launcher.cli.plan import command
from launcher.recipe.load import dump_resolved, load_recipe
from megatron_rl.contract.attempt_records import MetricsLine
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append

RECIPE = ("qwen2.5-32b-dapo", "--cluster", "h100", "grpo.prompts_per_step=8", "grpo.global_batch=128")
TOO_LARGE = ("training.tokens_per_microbatch=300000", "placement.offload=none")
pytestmark = pytest.mark.usefixtures("no_clusters_of_the_user")


def mrl_plan(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(command, list(arguments))


def splits(*arguments: str) -> list[dict[str, Any]]:
    result = mrl_plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.output)["splits"]
    return found


@pytest.mark.parametrize(
    ("overrides", "inference_nodes"),
    [
        (("inference.engine=megatron",), {0}),
        (("inference.engine=vllm",), {0, 1, 2, 3, 4, 5, 6, 7}),
    ],
)
def test_only_splits_that_the_engine_can_run_are_compared(
    overrides: tuple[str, ...], inference_nodes: set[int]
) -> None:
    assert {split["inference_nodes"] for split in splits(*RECIPE, *overrides)} == inference_nodes


def test_the_speed_of_another_engine_is_said_to_be_that_of_the_projects_own() -> None:
    overrides = ("inference.engine=vllm", "placement.mode=partitioned", "placement.inference.nodes=2")
    text = " ".join(mrl_plan(*RECIPE, *overrides).output.split())
    assert "estimated for H100, with vllm as fast as mrl's own engine (not measured)" in text
    assert "of 73.6 GiB, 0.92 of the GPU: vLLM takes all of it, and its cache what the rest leaves" in text


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Record of a co-located run of the demo: 4 s of generation, 3 s of training, 1 s of rewards per step."""
    made = RunDir(tmp_path / "mine")
    made.root.mkdir()
    made.resolved.write_text(dump_resolved(load_recipe("demo").config), encoding="utf-8")
    for step in range(1, 6):
        slow = 100.0 * (step == 1)
        values = {
            "time/step_s": 8.0 + slow,
            "time/generate_s": 4.0 + slow,
            "time/train_s": 3.0,
            "time/reward_s": 1.0,
            "answer_length": 3.0,
            "answer_length_max": 3,
            "truncated_ratio": 1.0,
            "prompt_length": 4.0,
            "staleness_max": 0,
        }
        append(made.metrics, MetricsLine(step, values))
    return made


def test_the_table_has_a_row_for_each_split_and_marks_the_fastest():
    result = mrl_plan(*RECIPE)
    assert result.exit_code == 0
    assert all(len(line) <= 80 for line in result.output.splitlines())
    rows = result.output.partition("step time by split, estimated for H100")[2].splitlines()
    assert [row.split("  ")[0] for row in rows[3:11]] == ["co-located", *(f"{8 - n} + {n}" for n in range(1, 8))]
    assert "".join(rows[3:11]).count("*") == 2


def test_the_time_of_the_run_is_shown_co_located_and_at_each_lag_on_the_fastest_split():
    failing = ("--preempt-every", "4", "--node-fails-every", "1000", "--max-lag", "0,2")
    shown = mrl_plan(*RECIPE, "training.steps=6000", *failing).output.partition("the run of 6,000 steps, ")[2]
    assert "preempted every 4 h with 120 s of notice and 10 min in the queue, each" in " ".join(shown.split())
    rows = [line for line in shown.splitlines() if "lag " in line]
    assert [row.split("  ")[0] for row in rows] == ["co-located, lag 0", "co-located, lag 2", "lag 0", "lag 2"]
    assert "the run of 6,000 steps, without failures" in mrl_plan(*RECIPE, "training.steps=6000").output


def test_runs_as_json_take_longer_the_more_they_fail():
    def runs(*more: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(mrl_plan(*RECIPE, "--json", *more).output)["runs"]
        return found

    never, seldom, often = runs(), runs("--preempt-every", "6"), runs("--preempt-every", "1")
    assert [run["mode"] for run in never] == ["co-located, lag 0", "co-located, lag 1", "lag 0", "lag 1"]
    assert [run["split"]["inference_nodes"] > 0 for run in never] == [False, False, True, True]
    for one, two, three in zip(never, seldom, often, strict=True):
        assert one["seconds"] < two["seconds"] < three["seconds"]
        assert 1 >= one["goodput"] > two["goodput"] > three["goodput"] > 0
        assert one["attempts"] == 1 < two["attempts"] < three["attempts"]


def test_splits_as_json_have_the_idle_share_of_each_role():
    found = splits(*RECIPE, "--max-lag", "0,2")
    colocated, *apart = found
    assert [lag["idle_training"] == lag["idle_inference"] for lag in colocated["lags"]] == [True, True]
    for split in apart:
        lag_0, lag_2 = split["lags"]
        assert lag_2["step_s"] < lag_0["step_s"]
        busy_s = lag_0["train_s"] + lag_0["refit_s"]
        assert lag_0["step_s"] == pytest.approx(busy_s / (1 - lag_0["idle_training"]))
    assert apart[0]["lags"][0]["idle_training"] > apart[-1]["lags"][0]["idle_training"]


def test_a_split_that_does_not_fit_is_never_the_best():
    found = splits(*RECIPE, "training.tokens_per_microbatch=30000", "placement.offload=none")
    small = [split for split in found if split["lacks_bytes"]]
    assert small
    assert not any(lag["best"] for split in small for lag in split["lags"])


def test_a_faster_card_and_shorter_answers_take_less_time():
    def step_s(*more: str) -> float:
        best: float = min(lag["step_s"] for split in splits(*RECIPE, *more) for lag in split["lags"])
        return best

    assert step_s("--card", "B200") < step_s()
    assert step_s("--answer-tokens", "500") < 0.75 * step_s()


def test_only_some_splits_of_a_large_allocation_are_compared():
    found = splits(*RECIPE, "job.nodes=64", "placement.training.pp=8", "--max-lag", "1")
    assert [split["inference_nodes"] for split in found] == [0, 8, 16, 24, 32, 40, 48, 56]


def test_a_measured_run_is_planned_as_it_was_measured(run):
    (colocated,) = splits("demo", "--measured", str(run.root))
    lag, _ = colocated["lags"]
    assert (lag["generate_s"], lag["step_s"]) == (pytest.approx(4.0), pytest.approx(8.0))
    printed = mrl_plan("demo", "--measured", str(run.root)).output
    assert "step time by split, as measured in 4 steps of mine" in printed


def test_lags_are_sorted_without_repeats():
    assert Lags().convert("2,0,2", None, None) == (0, 2)


def test_cpu_speeds_are_not_estimated():
    assert splits("demo") == []
    assert "step time" not in mrl_plan("demo").output


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("demo", "--card", "H100"),
            "job.device is cpu: speeds of CPUs are not estimated; give a run of this recipe: --measured RUN",
        ),
        ((*RECIPE, "--card", "V100"), "--card V100: unknown card; known cards: GB200, "),
        ((*RECIPE, "--answer-tokens", "20000"), "a mean of 20000 tokens is not between 1 and the limit of 10,975"),
        ((*RECIPE, "--max-lag", "2-"), "'2-' is not a list of numbers such as 0,1,2"),
        ((*RECIPE, "--max-lag", "17"), "17 is not between 0 and 16"),
        ((*RECIPE, "--measured", "RUN"), "it trained another model"),
        (("demo", "--measured", "RUN", "--card", "H100"), "leave out --card and --answer-tokens"),
        (("demo", "--measured", "xyzzy"), "no run is called 'xyzzy'"),
        (("demo", "--preempt-every", "1"), "speeds of CPUs are not estimated"),
        (("demo", "--queue", "2"), "--queue: this option describes preemptions; add --preempt-every HOURS"),
        ((*RECIPE, "--preempt-every", "0"), "--preempt-every"),
        ((*RECIPE, "--node-fails-every", "0.01"), "the run would not advance; give longer times to --preempt-every"),
        ((*RECIPE, *TOO_LARGE, "--preempt-every", "1"), "no split of these nodes fits"),
    ],
)
def test_bad_arguments_are_refused_with_a_remedy(run, arguments, error):
    result = mrl_plan(*(str(run.root) if one == "RUN" else one for one in arguments))
    assert result.exit_code == 2
    assert error in str(result.output or result.exception)


def test_a_run_with_fewer_than_two_steps_is_refused(run):
    run.metrics.write_text('{"step": 1, "time/step_s": 1.0}\n', encoding="utf-8")
    result = mrl_plan("demo", "--measured", str(run.root))
    assert (result.exit_code, "has not made two steps yet" in result.output) == (2, True)
