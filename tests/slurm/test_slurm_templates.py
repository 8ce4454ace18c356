"""The two templates for people who live by plain sbatch: with the marked lines edited they are jobs like any other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from lab import wait_until
from login import SECONDS, Login
from together import Together

from launcher.cluster.choice import load_clusters
from launcher.plan.placement import place
from launcher.recipe.load import load_recipe

TEMPLATES = Path(__file__).parents[2] / "slurm"

together = Together()


def edited(name: str, login: Login, recipe: list[str], nodes: int) -> str:
    """A template as a user with this small cluster edits it."""
    run_dir = login.share / "my-run"
    text = (TEMPLATES / f"{name}.sbatch").read_text()
    text = re.sub(r"recipe=\(.*?\n\)", f"recipe=({' '.join(recipe)})", text, flags=re.DOTALL)
    for pattern, line in (
        (r"#SBATCH --partition=\S+", "#SBATCH --partition=low"),
        (r"#SBATCH --account=.*\n", ""),
        (r"#SBATCH --nodes=\d+", f"#SBATCH --nodes={nodes}"),
        (r"#SBATCH --ntasks-per-node=8", "#SBATCH --ntasks-per-node=1"),
        (r"#SBATCH --gpus-per-node=8.*\n", ""),
        (r"#SBATCH --output=\S+", f"#SBATCH --output={run_dir}.log"),
        (r"--signal=B:USR1@\d+", "--signal=B:USR1@120"),
        (r"cluster=my-cluster", "cluster=stub"),
        (r"run_dir=\S+", f"run_dir={run_dir}"),
        (
            r"source \S+",
            f"export PATH={Path(sys.executable).parent}:$PATH MRL_CLUSTERS={login.env['MRL_CLUSTERS']}",
        ),
    ):
        text, found = re.subn(pattern, line, text)
        assert found, pattern
    return text


@together
def test_edited_colocated_template_trains_and_resumes_after_a_drain(login: Login) -> None:
    runs_and_goes_on(login, "colocated")


@pytest.mark.slow
@together
def test_edited_partitioned_template_trains_and_resumes_after_a_drain(login: Login) -> None:
    runs_and_goes_on(login, "partitioned")


def runs_and_goes_on(login: Login, name: str) -> None:
    login.share.mkdir()
    script = login.home / f"{name}.sbatch"
    script.write_text(edited(name, login, ["demo", "job.nodes=2", "job.gpus_per_node=1"], nodes=2))
    job = login.sbatch(script, stub={"steps": 40})
    root = login.share / "my-run"
    wait_until(f"job {job} has made {root}", (root / "job.json").exists, SECONDS)
    run = login.adopt(root)
    assert run.job == job
    run.wait_for_step(3)
    login.lab.run("scancel", "--batch", "--signal=USR1", job)
    run.wait("COMPLETED")
    assert run.ends() == [("drained", "signal"), ("finished", None)]
    assert [line["step"] for line in run.metrics()] == list(range(1, 41))
    assert sorted(path.name for path in login.share.glob("my-run*")) == ["my-run", "my-run.log"]


@together
def test_template_refused_by_mrl_submit_leaves_only_its_log(login: Login) -> None:
    login.share.mkdir()
    script = login.home / "colocated.sbatch"
    script.write_text(edited("colocated", login, ["demo", "job.nodes=two"], nodes=2))
    job = login.sbatch(script)
    asked = ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}")
    wait_until(f"job {job} has failed", lambda: login.lab.run(*asked).strip() == "FAILED", SECONDS)
    said = (login.share / "my-run.log").read_text()
    assert "job.nodes: expected an integer > 0 or a range such as 4-8, got 'two'" in said
    assert [path.name for path in login.share.iterdir()] == ["my-run.log"]


@pytest.mark.parametrize("name", ["colocated", "partitioned"])
def test_template_requests_the_resources_of_its_recipe(name: str) -> None:
    text = (TEMPLATES / f"{name}.sbatch").read_text()
    words = re.sub(r"\s+#.*", "", re.search(r"recipe=\((.*?)\n\)", text, re.DOTALL)[1]).split()
    config = load_recipe(words[0], words[1:]).config
    assert config.placement.mode == name
    assert f"#SBATCH --nodes={config.job.most_nodes + config.job.spare_nodes} " in text
    assert f"#SBATCH --ntasks-per-node={config.job.gpus_per_node} " in text
    place(config.job, config.placement, 8, config.model)
    profile = load_clusters(environ={"HOME": "/home/me"}).profile("h100")
    assert f"#SBATCH --signal=B:USR1@{profile.signal_s} " in text
