"""Whether a rank delays the others in step after step, or it is chance."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli.explain import command as mrl_explain
from launcher.cli.status import command as mrl_status
from launcher.recipe.load import dump_resolved, load_recipe
from launcher.runs.slow_ranks import STEPS, SlowRank, read_slow_ranks, slow_ranks
from megatron_rl.contract.attempt_records import Heartbeat, MetricsLine, SlowestRank, TimelineLine
from megatron_rl.contract.heartbeat_files import write_heartbeat
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append


def lines(*steps: dict[str, SlowestRank]) -> list[TimelineLine]:
    """Steps of ten seconds after the line of the load."""
    loaded = TimelineLine(100.0, 0, {"load": 9.0}, began=90.0, ranks=16, resumed=0)
    found = [
        TimelineLine(100.0 + 10 * step, step, {"train": 160.0}, slowest=one) for step, one in enumerate(steps, start=1)
    ]
    return [loaded, *found]


def recorded(
    folder: Path, steps: list[TimelineLine], *changes: str, ranks: tuple[int, ...] = (1,), host: str = "node7"
) -> RunDir:
    run = RunDir(folder / "run")
    attempt = run.attempt(1)
    attempt.heartbeats.mkdir(parents=True)
    run.resolved.write_text(dump_resolved(load_recipe("demo", changes).config), encoding="utf-8")
    for rank in ranks:
        write_heartbeat(attempt.heartbeats, Heartbeat(rank, 2, host, "training", 30, 90, 1.0, 1.0, 5.0))
    for line in steps:
        append(attempt.timeline, line)
    return run


def node(rank: int) -> str:
    return f"node{rank // 8}"


def slow(record: list[TimelineLine], *, generates: bool = True, nodes: int = 2) -> list[SlowRank]:
    return slow_ranks(record, generates, node, nodes)


def test_a_rank_that_is_slowest_in_nearly_every_step_is_named_with_its_node_and_phase():
    steps = [{"train": SlowestRank(11, 8.0, 6.0)}] * 18 + [{"train": SlowestRank(3, 6.5, 6.0)}] * 2
    assert slow(lines(*steps)) == [SlowRank("train", 11, "node1", 18, STEPS, pytest.approx(18 * 2 / 200))]
    seen = str(slow(lines(*steps))[0])
    assert seen == "rank 11 on node1 was slowest in train in 18 of 20 steps, for 18% of their time"


def test_a_rank_that_is_slow_everywhere_is_named_for_what_it_delays_most():
    of_step = {
        "generate": SlowestRank(2, 5.0, 3.0),
        "train": SlowestRank(2, 4.0, 3.0),
        "wait": SlowestRank(2, 0.0, 3.0),
    }
    assert [(one.phase, one.share) for one in slow(lines(*[of_step] * STEPS))] == [("generate", 0.2), ("train", 0.1)]


def test_a_rank_that_only_waits_less_is_slow_in_the_step_as_a_whole():
    (found,) = slow(lines(*[{"wait": SlowestRank(2, 0.5, 3.0)}] * STEPS))
    assert str(found) == "rank 2 on node0 was slowest in the step as a whole in 20 of 20 steps, for 25% of their time"


def test_ranks_of_one_node_that_take_turns_are_named_by_their_node():
    turns = [{"train": SlowestRank(8 + step % 3, 8.0, 6.0)} for step in range(STEPS)]
    (found,) = slow(lines(*turns))
    assert str(found) == "a rank on node1, most often 8, was slowest in train in 20 of 20 steps, for 20% of their time"
    assert slow(lines(*turns), nodes=1) == []


def test_chance_and_small_differences_are_nothing():
    draw = random.Random(0)
    by_chance = [{"generate": SlowestRank(draw.randrange(16), 9.0, 3.0)} for _ in range(STEPS)]
    assert slow(lines(*by_chance)) == []
    assert slow(lines(*[{"train": SlowestRank(1, 6.2, 6.0)}] * STEPS)) == []
    assert slow(lines(*[{"train": SlowestRank(1, 9.0, 6.0)}] * (STEPS - 1))) == []


def test_ranks_that_wait_for_replicas_are_not_compared_by_it():
    of_step = {"generate": SlowestRank(0, 9.0, 0.1), "wait": SlowestRank(0, 0.1, 9.0)}
    assert slow(lines(*[of_step] * STEPS), generates=False) == []
    assert len(slow(lines(*[of_step] * STEPS))) == 1


def test_a_repeated_step_and_work_between_steps_are_no_steps():
    record = lines(*[{"train": SlowestRank(1, 9.0, 6.0)}] * STEPS)
    saved = record[-1]._replace(at=record[-1].at + 50)
    assert slow([*record, saved]) == slow(record) != []


@pytest.mark.parametrize("changes", [[], ["placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1"]])
def test_status_and_explain_show_the_slow_rank(tmp_path: Path, changes: list[str]):
    steps = lines(*[{"train": SlowestRank(1, 9.0, 6.0), "generate": SlowestRank(0, 9.0, 0.1)}] * STEPS)
    run = recorded(tmp_path, steps, *changes)
    for line in steps:
        append(run.metrics, MetricsLine(line.step, {"mean_reward": 0.5}))
    expected = "rank 1 on node7 was slowest in train in 20 of 20 steps, for 30% of their time"
    assert str(read_slow_ranks(run)[-1]) == expected
    assert len(read_slow_ranks(run)) == (1 if changes else 2)
    status = CliRunner().invoke(mrl_status, [str(run.root)]).stdout
    assert f"  slow rank  {expected}\n" in status
    told = json.loads(CliRunner().invoke(mrl_status, [str(run.root), "--json"]).stdout)["slow_ranks"][-1]
    assert (told["rank"], told["host"], told["phase"], told["share"]) == (1, "node7", "train", 0.3)
    found = json.loads(CliRunner().invoke(mrl_explain, [str(run.root), "--json"]).stdout)["findings"]
    (seen,) = (one["seen"] for one in found if one["rule"] == "slow-rank")
    assert seen.lower().endswith(expected)


def test_a_slow_node_of_an_elastic_run_is_named(tmp_path: Path):
    steps = lines(*({"train": SlowestRank(2 + step % 2, 9.0, 6.0)} for step in range(STEPS)))
    (found,) = read_slow_ranks(recorded(tmp_path, steps, "job.nodes=1-2", ranks=(2, 3)))
    assert (found.host, found.whole_node) == ("node7", True)


def test_the_name_of_a_host_reaches_no_terminal_as_a_command(tmp_path: Path):
    steps = lines(*[{"train": SlowestRank(1, 9.0, 6.0)}] * STEPS)
    (found,) = read_slow_ranks(recorded(tmp_path, steps, host="node\x1b]0;\u202e7"))
    assert found.host == r"node\x1b]0;\u202e7"


def test_a_damaged_run_has_no_slow_rank(tmp_path: Path):
    run = RunDir(tmp_path / "run")
    assert read_slow_ranks(run) == []
    run.root.mkdir()
    run.resolved.write_text("placement: 3\n", encoding="utf-8")
    assert read_slow_ranks(run) == []
