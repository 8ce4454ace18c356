"""The shell beside the ranks: on their node, in the container of their step."""

from __future__ import annotations

import subprocess

import pytest

from launcher.cli.attach import IGNORING_DRAIN, SHELL, command_line, completed, host_of
from megatron_rl.contract.attempt_records import NodeAssignment
from megatron_rl.contract.plan_records import PlanStep
from megatron_rl.contract.run_records import CODE, IMAGE

CONTAINER = ["--container-image={image}", "--no-container-mount-home", "--container-workdir={code}"]
STEPS = {"train": PlanStep("train", [0, 1], 8, 8), "infer-0": PlanStep("infer-0", [2], 4, 4)}
NODES = NodeAssignment(3, {"train": ["n1", "n3"], "infer-0": ["n4"]}, [], {})


@pytest.mark.parametrize(("rank", "role", "host"), [(0, "train", "n1"), (7, "train", "n1"), (8, "train", "n3")])
def test_ranks_fill_the_nodes_of_their_step_in_order(rank, role, host):
    assert host_of(rank, role, STEPS, NODES) == host


def test_a_rank_or_step_that_does_not_exist_is_named():
    with pytest.raises(LookupError, match="train has 16 ranks"):
        host_of(16, "train", STEPS, NODES)
    with pytest.raises(LookupError, match="there are train, infer-0"):
        host_of(0, "infer-1", STEPS, NODES)


def test_what_only_the_attempt_knows_takes_the_place_of_its_name():
    known = {IMAGE: "/a b.sqsh", CODE: "/run/code-001"}
    assert completed([*CONTAINER, "--container-mounts=/{image}:/a"], known) == [
        "--container-image=/a b.sqsh",
        "--no-container-mount-home",
        "--container-workdir=/run/code-001",
        "--container-mounts=/{image}:/a",
    ]


def test_a_drain_does_not_end_the_shell_which_has_what_the_ranks_have():
    line = command_line("7", "n3", [], {"ODD": "a b"}, ["sh", "-c", "kill -USR1 $$; echo here $ODD"], terminal=False)
    assert subprocess.run(line[line.index("sh") :], capture_output=True, text=True).stdout == "here a b\n"


def test_the_step_overlaps_with_the_ranks_and_has_a_terminal_only_where_there_is_one():
    line = command_line("7", "n3", ["--container-env=A"], {}, [], terminal=True)
    assert line[:3] == ["srun", "--jobid=7", "--overlap"]
    assert "--nodelist=n3" in line
    assert line[line.index("--pty") + 1 :] == ["--container-env=A", "sh", "-c", IGNORING_DRAIN, "attach", *SHELL]
    assert "--pty" not in command_line("7", "n3", [], {}, ["nvidia-smi"], terminal=False)
