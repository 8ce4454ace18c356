"""The shell beside the ranks: on their node, in the container that their script asks for."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from launcher.runs.attach import DEAF
from launcher.runs.attach import SHELL
from launcher.runs.attach import Place
from launcher.runs.attach import command_line
from launcher.runs.attach import container_flags
from launcher.runs.attach import exports
from launcher.runs.attach import place_of

PLAN = {"steps": [{"name": "train", "tasks_per_node": 8}, {"name": "infer-0", "tasks_per_node": 4}]}
NODES = {"steps": {"train": ["n1", "n3"], "infer-0": ["n4"]}}

SCRIPT = """
fabric() {
    srun --container-name=not-this-one x
}

train() {
    MRL_STEP=train exec srun --job-name=train \\
        --nodes=1 --nodelist="$(host job nodes train)" --ntasks=2 \\
        --container-image="$image" --container-mounts='/my data:/data:ro,/run:/run' \\
        --no-container-mount-home --container-workdir="$PWD" \\
        --container-env=MRL_RUN_DIR,HF_TOKEN \\
        sh -c "$deaf" rank python3 -m megatron_rl.rank_main --run-dir "$MRL_RUN_DIR"
}
"""


@pytest.mark.parametrize(("rank", "role", "host"), [(0, "train", "n1"), (7, "train", "n1"), (8, "train", "n3")])
def test_ranks_fill_the_nodes_of_their_step_in_order(rank, role, host):
    assert place_of(rank, role, PLAN, NODES) == Place(role, host)


def test_a_rank_or_step_that_does_not_exist_is_named():
    with pytest.raises(LookupError, match="train has 16 ranks"):
        place_of(16, "train", PLAN, NODES)
    with pytest.raises(LookupError, match="there are train, infer-0"):
        place_of(0, "infer-1", PLAN, NODES)


def test_the_container_is_that_of_the_training_step():
    assert container_flags(SCRIPT, "/cache/a b.sqsh", "/run/code-001") == [
        "--container-image=/cache/a b.sqsh",
        "--container-mounts=/my data:/data:ro,/run:/run",
        "--no-container-mount-home",
        "--container-workdir=/run/code-001",
        "--container-env=MRL_RUN_DIR,HF_TOKEN",
    ]


def test_the_environment_is_that_of_the_script():
    odd = 'it\'s "two"\nlines $(id)\nexport NOT=mine'
    script = (
        "#!/bin/bash\n# export A=comment\n\n"
        "export MRL_RUN_DIR=/run\nexport MRL_HOST_PYTHON=${MRL_HOST_PYTHON:-'my python'}\n"
        f"export ODD={shlex.quote(odd)}\nexport EMPTY=''\nexport HF_HOME='/a b'\n\nexport PROLOG=$(module list)\n"
    )
    assert exports(script) == {"MRL_RUN_DIR": "/run", "ODD": odd, "EMPTY": "", "HF_HOME": "/a b"}
    assert exports("main\n") == {}


def test_a_drain_does_not_end_the_shell():
    line = command_line("7", Place("train", "n3"), [], ["sh", "-c", "kill -USR1 $$; echo here"], terminal=False)
    assert subprocess.run(line[line.index("sh") :], capture_output=True, text=True).stdout == "here\n"


def test_without_a_container_there_are_no_flags():
    assert container_flags("train() {\n    srun --nodes=1 \\\n        python\n}\n", None, "/run") == []


def test_the_step_overlaps_with_the_ranks_and_has_a_terminal_only_where_there_is_one():
    line = command_line("7", Place("train", "n3"), ["--container-env=A"], [], terminal=True)
    assert line[:3] == ["srun", "--jobid=7", "--overlap"]
    assert "--nodelist=n3" in line
    assert line[line.index("--pty") + 1 :] == ["--container-env=A", "sh", "-c", DEAF, "attach", *SHELL]
    assert "--pty" not in command_line("7", Place("train", "n3"), [], ["nvidia-smi"], terminal=False)
