"""The process that supervises a local run, as mrl-submit starts it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys

import pytest

from launcher.backends.local import Supervisor, replica_command, supervisor_command
from launcher.errors import Failed
from launcher.host.attempt.local_ranks import LocalReplicas
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import INFER, RunDir


def test_one_that_cannot_be_started_is_an_error_of_one_line(tmp_path):
    with pytest.raises(Failed, match="the supervisor of the run cannot be started"):
        Supervisor([str(tmp_path / "python")])


def test_a_python_of_the_replicas_finds_the_code_of_mrl_and_nothing_else_of_this_one(tmp_path):
    """Not the packages beside it, such as torch, which are of another environment."""
    attempt = RunDir(tmp_path).attempt(1)
    command = replica_command("/usr/bin/env", attempt)
    assert command == ["env", f"PYTHONPATH={attempt.packages}", "/usr/bin/env", "-P", "-m", "megatron_rl.replica_main"]
    program = (
        "import megatron_rl.contract.paths, importlib.util as u; print(u.find_spec('torch'), u.find_spec('launcher'))"
    )
    other = [sys.executable, "-S", "-P", "-c", program]  # a Python without site-packages
    ran = subprocess.run([*command[:2], *other], capture_output=True, text=True, check=True)
    assert ran.stdout == "None None\n"


@pytest.mark.parametrize(
    ("placement", "vllms"),
    [
        (("job.gpus_per_node=2",), LocalReplicas(INFER, 2, 1, 1, (), shares_devices=True)),
        (("job.gpus_per_node=4", "placement.inference.tp=2"), LocalReplicas(INFER, 2, 1, 2, (), shares_devices=True)),
        (
            ("placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1"),
            LocalReplicas(INFER, 2, 1, 1, ()),
        ),
    ],
)
def test_each_vllm_of_a_run_is_one_process_with_its_gpus_beside_the_ranks_or_after_them(tmp_path, placement, vllms):
    heads = ("model.num_attention_heads=2", "model.num_query_groups=2")
    recipe = load_recipe("demo", ["inference.engine=vllm", *heads, *placement])
    run, sizes = RunDir(tmp_path), make_plan(recipe, None).sizes
    command = supervisor_command(run, run.attempt(1), recipe.config, sizes, 30.0, None)
    (given,) = [value for option, value in itertools.pairwise(command) if option == "--replicas"]
    assert LocalReplicas(*json.loads(given))._replace(command=()) == vllms
    assert command[command.index("--ranks") + 1] == str(sizes.training_world)


def test_this_python_needs_no_links(tmp_path):
    attempt = RunDir(tmp_path).attempt(1)
    assert replica_command(sys.executable, attempt)[0] == sys.executable
    assert not attempt.packages.exists()
