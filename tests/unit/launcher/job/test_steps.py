"""The argv in plan.json is what the script's srun lines come to: one for each step, completed by the attempt."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Container, Profile
from launcher.job.draft import Draft, draft, in_directory
from launcher.recipe.load import load_recipe
from megatron_rl.contract.run_records import ATTEMPT, CODE, HOSTS, IMAGE, LOGS, NODES, TASKS, PlanRecord
from megatron_rl.contract.shapes import from_json

HOME = {"HOME": "/home/ada", "MRL_CLUSTERS": "", "XDG_CONFIG_HOME": "/nowhere"}
KNOWN = {IMAGE: "/cache/a b.sqsh", CODE: "/shared/run/code-001", HOSTS: "n1,n2", NODES: "2", TASKS: "16", ATTEMPT: "3"}
KNOWN[LOGS] = "/shared/run/logs/attempt-003"


def a_draft(recipe: str, *overrides: str, on: Profile | None = None) -> Draft:
    asked = load_recipe(recipe, [*overrides, "code.include=[]"])
    profile = on or load_clusters(environ=HOME).profile("h100")
    return draft(asked, "h100", profile, Path("/shared/run"))


def plan_of(drafted: Draft) -> PlanRecord:
    return from_json(PlanRecord, drafted.job.plan_json)


def in_bash(script: str, function: str, name: str) -> list[str]:
    """The words of a step's srun, with the attempt's values, up to the command of the ranks."""
    (text,) = re.findall(rf"^{function}\(\) {{\n(.*?)^}}$", script, re.MULTILINE | re.DOTALL)
    srun = text[text.index("srun ") :].partition("sh -c")[0].replace("\\\n", " ")
    container = re.search(r"^    container=\(\n(.*?)^    \)$", script, re.MULTILINE | re.DOTALL)
    srun = srun.replace('"${container[@]}"', container[1] if container else "")
    hosts = '"${#hosts[@]}"'
    srun = srun.replace(f'"$(({hosts[1:-1]} * 8))"', KNOWN[TASKS]).replace(hosts, KNOWN[NODES])
    values = {'"$nodes"': HOSTS, '"$image"': IMAGE, '"$PWD"': CODE}
    for variable, placeholder in values.items():
        srun = srun.replace(variable, shlex.quote(KNOWN[placeholder]))
    return shlex.split(srun.replace("$logs", KNOWN[LOGS]).replace('"$1"', name).replace("$1", name))


def completed(options: list[str]) -> list[str]:
    for placeholder, value in KNOWN.items():
        options = [option.replace(placeholder, value) for option in options]
    return options


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("qwen2.5-32b-dapo", ()),
        ("qwen2.5-32b-dapo", ("job.nodes=4-8",)),
        ("qwen2.5-32b-dapo-partitioned", ()),
        ("qwen2.5-32b-dapo-partitioned", ("placement.inference.tp=4",)),
        ("demo", ()),
    ],
)
def test_plan_json_and_the_script_ask_srun_for_the_same(recipe, overrides):
    named = Container(image="a:b", name="it's mine", writable=True, mounts=["/my data:/data:ro"])
    plain = load_clusters(environ=HOME).profile("h100")
    for profile in (plain, plain.model_copy(update={"container": named})):
        drafted = a_draft(recipe, *overrides, on=profile)
        plan = plan_of(drafted)
        for step in plan.steps:
            words = in_bash(drafted.script, step.name.partition("-")[0], step.name)
            assert words[:2] == ["srun", f"--job-name={step.name}"]
            assert words[2:] == completed([*step.srun, *plan.container])


def test_each_plan_of_a_range_has_its_own(tmp_path):
    plan = plan_of(a_draft("qwen2.5-32b-dapo", "job.nodes=4-8"))
    assert [len(other.steps) for other in plan.alternatives] == [1] * len(plan.alternatives)
    assert all(f"--nodes={NODES}" in other.steps[0].srun for other in plan.alternatives)


def test_the_command_is_that_of_the_ranks():
    plan = plan_of(a_draft("qwen2.5-32b-dapo-partitioned", "placement.inference.tp=4"))
    commands = {step.name: step.command for step in plan.steps}
    assert commands["train"][-4:] == ["--run-dir", "/shared/run", "--attempt", ATTEMPT]
    assert commands["infer-1"][:2] == ["env", "CUDA_VISIBLE_DEVICES=4,5,6,7"]
    assert commands["infer-1"][-2:] == ["--replica", "1"]


def test_a_plan_is_of_its_run_directory_and_says_what_the_script_exports():
    drafted = a_draft("demo")
    job = in_directory(drafted.job, Path("/shared/other"))
    plan = from_json(PlanRecord, job.plan_json)
    assert job.plan_json["version"] == 1
    assert plan.environment["MRL_RUN_DIR"] == "/shared/other"
    assert "/shared/other:/shared/other" in " ".join(plan.container)
    exported = dict(re.findall(r"^ +export (\w+)=(.*)$", drafted.script, re.MULTILINE))
    for name, value in plan_of(drafted).environment.items():
        assert shlex.split(exported[name]) == ([value] if value else [""]), name
