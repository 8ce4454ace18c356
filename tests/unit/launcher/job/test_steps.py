"""The srun of each step, and what plan.json says about it to `mrl attach`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Container, Profile, Wrapper
from launcher.job.draft import Draft, draft, in_directory
from launcher.job.submit import PLAN_RECORDS, write_files
from launcher.recipe.load import load_recipe
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.plan_records import PlanRecord, PlanStep, steps_of
from megatron_rl.contract.records import read, write
from megatron_rl.contract.run_records import CODE, CONTAINER, IMAGE, CodeSnapshot
from megatron_rl.contract.shapes import from_json

HOME = {"HOME": "/home/ada", "MRL_CLUSTERS": "", "XDG_CONFIG_HOME": "/nowhere"}
KNOWN = {IMAGE: "/cache/a b.sqsh", CODE: "/shared/run/code-001", CONTAINER: "mrl-7-3:no_exec"}


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
    named = re.search(r"container\+=\((.*)\)$", script, re.MULTILINE)
    options = " ".join(found[1] for found in (container, named) if found)
    srun = srun.replace('"${container[@]}"', options)
    srun = srun.replace("$SLURM_JOB_ID-$MRL_ATTEMPT", "7-3")
    for variable, placeholder in {'"$image"': IMAGE, '"$PWD"': CODE}.items():
        srun = srun.replace(variable, shlex.quote(KNOWN[placeholder]))
    return shlex.split(srun.replace('"$1"', name).replace("$1", name))


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
        ("qwen2.5-32b-dapo-partitioned", ("placement.inference.tp=8",)),
        ("qwen2.5-32b-dapo-partitioned", ("inference.engine=native",)),
        ("demo", ()),
    ],
)
def test_plan_json_and_the_script_ask_pyxis_for_the_same(recipe, overrides):
    named = Container(image="a:b", named=False, writable=True, mounts=["/mine:/data:ro"])
    plain = load_clusters(environ=HOME).profile("h100")
    for profile in (plain, plain.model_copy(update={"container": named})):
        drafted = a_draft(recipe, *overrides, on=profile)
        plan = plan_of(drafted)
        for step in steps_of(plan, plan.nodes):
            words = in_bash(drafted.script, step.name.partition("-")[0], step.name)
            assert words[:2] == ["srun", f"--job-name={step.name}"]
            assert set(completed(plan.container)) <= set(words)


def test_a_flag_of_the_profile_is_one_word_whatever_is_in_it():
    odd = "--comment=it's $HOME `id` * \\ ;"
    on = load_clusters(environ=HOME).profile("h100").model_copy(update={"srun": [odd]})
    drafted = a_draft("demo", on=on)
    assert odd in in_bash(drafted.script, "train", "train")


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


def test_a_run_that_keeps_the_code_of_an_older_mrl_keeps_a_plan_that_lists_its_steps(tmp_path):
    run = RunDir(tmp_path)
    job = in_directory(a_draft("qwen2.5-32b-dapo", "job.nodes=2-3").job, tmp_path)
    run.code.mkdir()
    write(run.code_record, CodeSnapshot(1, 0.0, [], []))
    write_files(run, job, update_code=False)
    plan = read(PlanRecord, run.plan)
    assert isinstance(plan, PlanRecord)
    assert (plan.roles, plan.steps) == ([], [PlanStep("train", [0, 1, 2], 8, 8)])
    newer = run.code / PLAN_RECORDS
    newer.parent.mkdir(parents=True)
    newer.touch()
    write_files(run, job, update_code=False)
    plan = read(PlanRecord, run.plan)
    assert isinstance(plan, PlanRecord)
    assert (plan.smaller, plan.steps) == ([2], None)


def test_the_ranks_fill_one_socket_after_the_other_and_the_profile_can_say_otherwise():
    """GPUs are numbered by socket; Slurm's default is cyclic over the sockets of a node."""
    ranks = ("fabric", "train", "infer")
    script = a_draft("qwen2.5-32b-dapo-partitioned").script
    assert all("--distribution=block:block" in in_bash(script, step, "infer-0") for step in ranks)
    assert "--cpu-bind" not in script
    h100 = load_clusters(environ=HOME).profile("h100")
    other = h100.model_copy(update={"distribution": None, "cpu_bind": "map_ldom:0,1"})
    script = a_draft("qwen2.5-32b-dapo-partitioned", "inference.engine=native", on=other).script
    assert "--distribution" not in script
    assert all("--cpu-bind=map_ldom:0,1" in in_bash(script, step, "infer-0") for step in ranks)


def test_the_ranks_alone_have_few_threads_and_a_home_that_can_be_written_to(tmp_path):
    """nproc, which enroot uses, obeys OMP_NUM_THREADS, and the container has no home directory."""
    h100 = load_clusters(environ=HOME).profile("h100")
    on = h100.model_copy(update={"run_root": f"{tmp_path}/it's", "environment": {"TRITON_CACHE_DIR": "/local"}})
    drafted = a_draft("demo", on=on)
    header = drafted.script.partition("\nset -u")[0]
    assert "OMP_NUM_THREADS" not in header
    assert "HOME" not in re.findall(r"export (\w+)=", header)
    (before,) = re.findall(r"^before=.*$", drafted.script, re.MULTILINE)
    shown = subprocess.run(
        ["sh", "-c", f'{before}; sh -c "$before" rank env; ls "{tmp_path}/it\'s/cache"'], capture_output=True, text=True
    ).stdout
    cache = f"{tmp_path}/it's/cache"
    expected = {"OMP_NUM_THREADS": "1", "HOME": f"{cache}/home", "MRL_CACHE": f"{cache}/mrl", "XDG_CACHE_HOME": cache}
    expected |= {"MPLCONFIGDIR": f"{cache}/matplotlib", "TRITON_CACHE_DIR": "/local"}
    assert set(shown.splitlines()) >= {f"{name}={value}" for name, value in expected.items()} | {"home"}
    assert {**plan_of(drafted).rank_environment, **expected} == plan_of(drafted).rank_environment


def test_without_a_container_the_ranks_keep_the_home_of_the_node():
    plain = load_clusters(environ=HOME).profile("plain")
    assert "HOME" not in plan_of(a_draft("demo", on=plain)).rank_environment


def test_all_ranks_see_sets_in_one_order():
    """Some tasks of reasoning-gym draw by the hash seed."""
    for cluster in ("h100", "plain"):
        profile = load_clusters(environ=HOME).profile(cluster)
        assert plan_of(a_draft("demo", on=profile)).rank_environment["PYTHONHASHSEED"] == "0"


def test_flags_of_srun_are_for_the_ranks_and_those_of_the_container_for_all_that_is_in_it():
    flags = ["--mpi=pmix", "--no-container-entrypoint", "--label"]
    on = load_clusters(environ=HOME).profile("h100").model_copy(update={"srun": flags})
    drafted = a_draft("qwen2.5-32b-dapo-partitioned", on=on)
    for step in ("fabric", "train", "infer"):
        assert set(flags) <= set(in_bash(drafted.script, step, "infer-0"))
    plan = plan_of(drafted)
    assert "--no-container-entrypoint" in plan.container  # which mrl attach goes by
    assert "--mpi" not in drafted.script.partition("fabric()")[0], "not for the check of the nodes"
    with pytest.raises(ValueError, match="not a flag of srun"):
        Profile(gpus_per_node=8, run_root="/x", srun=["-K"])


def started(wrapper: Wrapper | None, step: str, rank: int) -> str:
    """Command line of a rank."""
    on = load_clusters(environ=HOME).profile("plain").model_copy(update={"wrapper": wrapper})
    (before,) = re.findall(r"^before=.*$", a_draft("demo", on=on).script, re.MULTILINE)
    environ = {**os.environ, "MRL_STEP": step, "SLURM_PROCID": str(rank)}
    command = ["sh", "-c", f'{before}; exec sh -c "$before" rank printf "<%s>" python "a b"']
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_ranks_are_started_by_the_wrapper_which_may_be_for_some_of_them():
    assert started(None, "train", 0) == "<python><a b>"
    everywhere = Wrapper(command=["env", "printf", "[%s]", "it's"])
    assert started(everywhere, "train", 3) == started(everywhere, "infer-1", 0) == "[it's][printf][<%s>][python][a b]"
    assert started(everywhere, "fabric", 0) == "<python><a b>"
    some = Wrapper(command=["printf", "[%s]"], ranks=[0, 8])
    assert started(some, "train", 8).startswith("[printf]")
    assert started(some, "train", 1) == started(some, "infer-0", 0) == "<python><a b>"


def test_the_ranks_have_the_limits_of_the_node_and_not_those_of_whoever_submitted():
    (before,) = re.findall(r"^before=.*$", a_draft("demo").script, re.MULTILINE)
    hard = subprocess.run(["sh", "-c", "ulimit -H -l; ulimit -H -n"], capture_output=True, text=True).stdout
    lowered = f'ulimit -S -l 8; ulimit -S -n 64; {before}; sh -c "$before" rank sh -c "ulimit -S -l; ulimit -S -n"'
    assert subprocess.run(["sh", "-c", lowered], capture_output=True, text=True).stdout == hard


@pytest.mark.parametrize("form", ["nvcr.io#nvidia/pytorch:25.06-py3", "docker://u@nvcr.io/nvidia/pytorch:25.06-py3"])
def test_an_image_that_is_known_to_lack_megatron_core_is_told_in_a_dry_run(form):
    on = load_clusters(environ=HOME).profile("h100").model_copy(update={"container": Container(image=form)})
    assert any("has no megatron-core" in note for note in a_draft("demo", on=on).notes)
    on = on.model_copy(update={"container": Container(image="nvcr.io#team/pytorch:1")})
    assert not any("megatron-core" in note for note in a_draft("demo", on=on).notes)
    assert not any("megatron-core" in note for note in a_draft("demo", f"image.reference={'team/mrl:1'}").notes)
