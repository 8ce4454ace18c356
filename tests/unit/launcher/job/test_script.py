"""The sbatch script of shipped recipes on shipped clusters. No value can break out of its quotes.

The golden files in tests/unit/scripts are for readers: after an intended change, UPDATE_GOLDEN=1 pytest rewrites
them, and the diff is part of the change.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.cluster.choice import load_clusters
from launcher.cluster.profile import Container, Mail, Profile
from launcher.doctor.node_files import to_mount
from launcher.errors import BadInput
from launcher.host.attempt.notify import NotifySettings
from launcher.job.script import PlannedJob, header, render
from launcher.plan.summary import make_plan
from launcher.recipe.load import load_recipe
from launcher.recipe.shipped import shipped_recipes
from megatron_rl.contract.attempt_records import AttemptStart
from megatron_rl.contract.paths import RunDir
from megatron_rl.contract.records import append
from megatron_rl.contract.run_records import CodeSource
from megatron_rl.recipe.evaluation_job import Evaluation

GOLDEN = Path(__file__).parent / "scripts"
HOME = {"HOME": "/home/ada", "MRL_CLUSTERS": "", "XDG_CONFIG_HOME": "/nowhere"}
SOURCES = [CodeSource("/opt/mrl/launcher", "launcher", "package")]
NASTY = 'it\'s "$(touch broken)" `id` 100% \\ é'


def profile(name: str = "h100", **changes: object) -> Profile:
    shipped = load_clusters(environ=HOME).profile(name)
    fixed = {"python": "/opt/mrl/bin/python"} if shipped.container is None else {}
    return shipped.model_copy(update=fixed | changes)


def a_job(
    recipe: str = "demo", *overrides: str, on: Profile | None = None, run_dir: str = "/shared/runs/it"
) -> PlannedJob:
    asked = load_recipe(recipe, overrides)
    cluster = on or profile()
    plan = make_plan(asked, cluster)
    return PlannedJob(
        recipe=asked,
        plan=plan,
        plan_json={},
        cluster="h100",
        profile=cluster,
        run_dir=Path(run_dir),
        sources=SOURCES,
        seen=to_mount(asked, cluster, Path(run_dir)),
        version="0.1.0",
    )


BESIDE = ("inference.engine=vllm", "inference.vllm.image=vllm/vllm-openai:v0.32.0", "placement.inference.tp=4")
SHAPES = {
    "qwen2.5-32b-dapo": ("h100",),
    "qwen2.5-32b-dapo-partitioned": ("h100",),
    "qwen2.5-32b-dapo-vllm": ("h100", "qwen2.5-32b-dapo", *BESIDE),
    "demo": ("plain",),
}
"""Scripts that have other functions; those of other recipes differ in values. And where each is golden, and its recipe
if that has another name."""


@pytest.mark.parametrize("name", SHAPES)
def test_the_script_is_the_golden_one(name, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/opt/mrl/bin/python")
    cluster, *asked = SHAPES[name]
    text = render(a_job(*(asked or [name]), on=profile(cluster), run_dir=f"/shared/runs/{name}-20261121-080000"))
    golden = GOLDEN / f"{name}.{cluster}.sbatch"
    if "UPDATE_GOLDEN" in os.environ:
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("cluster", ["h100", "plain"])
def test_bash_and_shellcheck_have_nothing_to_say(cluster, tmp_path):
    script = tmp_path / "job.sbatch"
    named = {"container": Container(image="a:b", named=False, writable=True)} if cluster == "h100" else {}
    for recipe in (*shipped_recipes(), "qwen2.5-32b-dapo-vllm") if cluster == "h100" else SHAPES:
        asked = SHAPES.get(recipe, ())[1:] or [recipe]
        script.write_text(render(a_job(*asked, on=profile(cluster, **named))))
        checks = [["bash", "-n"]] + [["shellcheck"]] * (recipe in SHAPES and shutil.which("shellcheck") is not None)
        for check in checks:
            said = subprocess.run([*check, script], capture_output=True, text=True, check=False)
            assert said.returncode == 0, (recipe, said.stdout, said.stderr)


def has_code(root: Path) -> None:
    """Give a run directory the code of this checkout."""
    if not (root / "code").exists():
        (root / "code").symlink_to(Path(__file__).parents[4])


def without_start(script: str) -> str:
    """A script without its last command, which starts it."""
    return script[: script.rindex("\ncase ${1:-} in")] + "\n"


def values_in_bash(script: str, *names: str) -> list[str]:
    """Values of a script's variables once bash has read it."""
    shown = "\n".join(f'printf "%s\\0" "${name}"' for name in names)
    text = without_start(script) + shown
    run = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=10, check=True)
    return run.stdout.split("\0")[:-1]


def test_no_value_can_break_out_of_its_quotes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = f"{NASTY}\nexport OTHER=1"
    script = render(
        a_job(
            run_dir=f"/shared/{NASTY}",
            on=profile("plain", environment={"ODD": lines}, run_root=f"/root {NASTY}", host_python=f"/{NASTY}/python"),
        )
    )
    found = values_in_bash(script, "MRL_RUN_DIR", "ODD", "HF_HOME", "MRL_HOST_PYTHON")
    assert found == [f"/shared/{NASTY}", lines, f"/root {NASTY}/cache/huggingface", f"/{NASTY}/python"]
    assert not list(tmp_path.iterdir()), "something was executed"


def test_the_host_side_gets_the_notifications_of_the_recipe(tmp_path):
    script = render(a_job("demo", "notify={command: [sh, -c, 'echo \"$MRL_TEXT\"'], webhook: HOOK, on: [held]}"))
    (line,) = [line.strip(" \\") for line in script.splitlines() if "--notify" in line]
    shown = subprocess.run(
        ["bash", "-c", f"printf %s {line.removeprefix('--notify ')}"], capture_output=True, check=True
    )
    found = NotifySettings.parse(shown.stdout.decode())
    assert found == NotifySettings(["held"], ["sh", "-c", 'echo "$MRL_TEXT"'], "HOOK", 1800.0)


def test_a_percent_sign_in_a_path_is_none_of_slurms_patterns():
    assert "--output='/shared/100%% it.log'" in header(a_job(run_dir="/shared/100% it"))


def test_a_path_that_no_script_can_hold_is_refused():
    with pytest.raises(BadInput, match="line break"):
        render(a_job(run_dir="/shared/a\nb"))


def test_a_path_that_pyxis_cannot_mount_is_refused():
    with pytest.raises(BadInput, match="colon or a comma"):
        render(a_job(run_dir="/shared/a:b"))
    assert render(a_job(run_dir="/shared/a:b", on=profile("plain")))


@pytest.mark.parametrize("places", [{"run_dir": "/shared/a b"}, {"on": profile(run_root="/shared/my runs")}], ids=str)
def test_a_path_that_enroot_cannot_mount_is_refused(places):
    with pytest.raises(BadInput, match="enroot cannot mount a path with white space"):
        render(a_job(**places))


def test_the_header_asks_for_what_recipe_and_profile_say():
    on = profile(
        partition="gpu",
        account="team",
        qos="high",
        constraint="ib&h100",
        reservation="week",
        gres="h100",
        mail=Mail(to="ada@example.org", when=["END", "FAIL"]),
        sbatch=["--switches=1"],
    )
    said = header(a_job("qwen2.5-32b-dapo", "job.spare_nodes=1", "job.time_limit=2:00:00", on=on))
    for option in (
        "--partition=gpu",
        "--account=team",
        "--qos=high",
        "--constraint='ib&h100'",
        "--reservation=week",
        "--nodes=9",
        "--ntasks-per-node=8",
        "--gpus-per-node=h100:8",
        "--time=2:00:00",
        "--mail-user=ada@example.org",
        "--mail-type=END,FAIL",
        "--switches=1",
        "--exclusive",
        "--requeue",
        "--mem=0",
        "--open-mode=append",
        "--no-kill",
    ):
        assert option in said


@pytest.mark.parametrize(
    ("gres", "asked"),
    [
        ("gpu", {"--gpus-per-node=8"}),
        ("h100", {"--gpus-per-node=h100:8"}),
        ("gres/gpu", {"--gres=gpu:8"}),
        ("gres/gpu:h100", {"--gres=gpu:h100:8"}),
        (None, set()),
    ],
)
def test_gpus_are_asked_for_as_the_cluster_knows_them(gres, asked):
    job = a_job("qwen2.5-32b-dapo", on=profile(gres=gres))
    assert {option for option in header(job) if option.startswith(("--gpus", "--gres"))} == asked
    assert set(re.findall(r"--(?:gpus-per-node|gres)=\S+", render(job))) == asked, "in the steps too"


def test_a_range_of_nodes_is_slurms_to_choose_from():
    assert "--nodes=4-8" in header(a_job("qwen2.5-32b-dapo", "job.nodes=4-8"))
    assert "--nodes=5-9" in header(a_job("qwen2.5-32b-dapo", "job.nodes=4-8", "job.spare_nodes=1"))
    assert "--nodes=4" in header(a_job("qwen2.5-32b-dapo", "job.nodes=4-4"))


def test_a_range_is_not_pinned_to_the_count_of_its_first_start():
    said = " ".join(header(a_job("qwen2.5-32b-dapo", "job.nodes=4-8")))
    assert "--ntasks" not in said
    assert "--gpus-per-node=8" in said


def test_the_ranks_of_a_range_are_counted_when_they_start():
    script = render(a_job("qwen2.5-32b-dapo", "job.nodes=4-8"))
    train = script.partition("\ntrain()")[2]
    geometry = re.search(r"--nodes=.* --nodelist=\"\$nodes\" --ntasks=.*(?= \\)", train)[0]
    ask = f"nodes=n1,n2,n5; IFS=, read -ra hosts <<<$nodes; echo {geometry}"
    shown = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True).stdout
    assert shown == "--nodes=3 --nodelist=n1,n2,n5 --ntasks=24 --ntasks-per-node=8 --gpus-per-node=8\n"


@pytest.mark.parametrize(
    ("seen", "own"),
    [
        (None, ["0,1,2,3", "4,5,6,7", "0,1,2,3"]),
        ("0,1,2,3,4,5,6,7", ["0,1,2,3", "4,5,6,7", "0,1,2,3"]),
        ("9,8,7,6,5,4,3,2", ["9,8,7,6", "5,4,3,2", "9,8,7,6"]),
        (",".join(f"GPU-{each}f" for each in range(8)), ["GPU-0f,GPU-1f,GPU-2f,GPU-3f", "GPU-4f,GPU-5f,GPU-6f,GPU-7f"]),
    ],
)
def test_replicas_that_share_a_node_see_their_own_gpus(tmp_path, seen, own):
    layout = ("placement.inference.tp=4", "placement.inference.nodes=4")
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *layout))
    assert "--overlap" in script
    names = [f"infer-{number}" for number in range(len(own))]
    assert [gpus_shown(asked, seen) for asked in asked_of_srun(tmp_path, script, *names)] == own


def gpus_shown(asked, seen=None):
    """GPUs that a replica sees, by the command that srun is given, where Slurm shows the step `seen`."""
    words = asked[asked.index("rank") + 1 :]
    (python,) = (at for at, word in enumerate(words) if word == "-P")
    environment = {"PATH": os.environ["PATH"], **({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})}
    show = [*words[: python - 1], "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    return subprocess.run(show, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def test_secrets_are_named_to_the_container_and_nothing_else(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    script = render(a_job("qwen2.5-32b-dapo", on=profile(secrets=["WANDB_API_KEY"])))
    assert "hunter2" not in script
    assert script.count("WANDB_API_KEY") == script.count("--container-env=") > 0
    assert "set -x" not in script
    assert "--export" not in script, "the default hands the whole environment on"


class TestElsewhere:
    """A host on which the script cannot become Python is left by bash alone."""

    SCONTROL = """#!/bin/sh
echo "$*" >>"$TOLD"
case "$1" in
    show) echo "JobId=7 JobName=it ExcNodeList=node[04-05] Restarts=1" ;;
    update) [ -e "$TOLD.pending" ] || { touch "$TOLD.pending"; exit 1; } ;;
esac
"""

    @pytest.fixture
    def start(self, tmp_path):
        root, tools = tmp_path / "run", tmp_path / "bin"
        tools.mkdir()
        (tools / "scontrol").write_text(self.SCONTROL)
        (tools / "scontrol").chmod(0o755)
        root.mkdir()

        def start(restarts: int, *, code: bool = True, python: str = "no-such-python"):
            if code:
                has_code(root)
            script = tmp_path / "job.sbatch"
            on = profile("plain", host_python=python)
            script.write_text(render(a_job("demo", on=on, run_dir=str(root))))
            slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts), "SLURMD_NODENAME": "node02"}
            environ = {**os.environ, **slurm, "TOLD": str(tmp_path / "told")}
            environ["PATH"] = f"{tools}:{environ['PATH']}"
            run = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, timeout=30, check=False)
            told = (tmp_path / "told").read_text().splitlines() if (tmp_path / "told").exists() else []
            return run, told

        start.root = root
        return start

    @pytest.mark.parametrize("missing", [{}, {"code": False}, {"python": "/bin/false-python"}], ids=str)
    def test_the_job_is_requeued_without_it(self, start, missing):
        run, told = start(0, **missing)
        assert run.returncode == 75
        assert "nothing is lost: the job comes back without this host" in run.stderr
        assert told[1] == "requeue 7"
        assert told[2:] == ["update JobId=7 ExcNodeList=node[04-05],node02"] * 2, "again, until it is pending"

    def test_an_older_python_is_like_none(self, start, tmp_path):
        old = tmp_path / "python"
        old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.version_info = (3, 8); $4"\n')
        old.chmod(0o755)
        run, told = start(0, python=str(old))
        assert f"{old} is not a Python 3.9 or later; nothing is lost" in run.stderr
        assert told[1] == "requeue 7"

    MODULE = """
import os, signal, time
from pathlib import Path
tries = Path(__file__).with_name("tries")
tries.write_text("." + (tries.read_text() if tries.exists() else ""))
if len(tries.read_text()) <= FAILURES:
    time.sleep = lambda seconds: None
    os.kill(os.getpid(), signal.SIGTERM)
    raise OSError(5, "Input/output error")
def main():
    print("started after", len(tries.read_text()), [int(each) for each in signal.sigpending()])
"""

    @pytest.mark.parametrize("failures", [2, 99])
    def test_code_that_cannot_be_read_for_a_moment_is_read_again(self, start, failures):
        folder = start.root / "code" / "launcher" / "host"
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        (folder / "job.py").write_text(self.MODULE.replace("FAILURES", str(failures)))
        run, told = start(0, python=sys.executable)
        if failures == 2:
            assert (run.stdout, run.stderr, told) == ("started after 3 [15]\n", "", [])
        else:
            assert "code cannot be imported: OSError(5, 'Input/output error'); nothing is lost" in run.stderr
            assert told[1] == "requeue 7"

    def test_but_not_for_ever(self, start):
        run, told = start(4)
        assert (run.returncode, told) == (1, [])
        assert "5 starts in a row failed, mrl resume continues" in run.stderr

    def test_where_attempts_have_begun_since_it_has_all_its_tries_again(self, start):
        lines = [AttemptStart(number, 0.0, job_id="7", restart=number - 1) for number in (1, 2, 3, 4)]
        for line in lines:
            append(RunDir(start.root).attempts_ledger, line)
        assert start(7)[0].returncode == 75
        assert start(8)[0].returncode == 1

    @pytest.mark.parametrize("seen", [True, False])
    def test_outside_a_job_it_says_so(self, tmp_path, monkeypatch, seen):
        """The Python that submitted it runs it, or the host's own python3 where the host does not have that one."""
        if not seen:
            monkeypatch.setattr(sys, "executable", "/no/such/python")
        script = tmp_path / "job.sbatch"
        has_code(tmp_path)
        script.write_text(render(a_job("demo", on=profile("plain"), run_dir=str(tmp_path))))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        run = subprocess.run(["bash", script], env=environ, capture_output=True, text=True, timeout=30, check=False)
        assert run.returncode == 2
        assert run.stderr == "error: this script is one for Slurm: sbatch it, or run it in an allocation (salloc)\n"


class TestReplacedDirectory:
    """Others who can write in the directory above a run's can put theirs in its place: none of its code runs."""

    OURS = "the code runs"

    @pytest.fixture
    def run(self, tmp_path):
        """A run directory with code, and its script. Above it others could write."""
        root = tmp_path / "run"
        self.fill(root)
        root.chmod(0o700)
        script = tmp_path / "job.sbatch"
        planned = a_job(on=profile("plain", host_python=sys.executable), run_dir=str(root))
        script.write_text(render(replace(planned, inode=root.stat().st_ino)))
        return root

    def fill(self, root: Path) -> None:
        folder = root / "code" / "launcher" / "host"
        folder.mkdir(parents=True)
        for package in (folder.parent, folder):
            (package / "__init__.py").touch()
        (folder / "job.py").write_text(f"def main():\n    print({self.OURS!r})\n")

    def start(self, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
        srun = root.parent / "srun"
        srun.write_text(f"#!/bin/sh\necho {self.OURS}\n")
        srun.chmod(0o755)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        environ |= {"PATH": f"{root.parent}:{environ['PATH']}", "MRL_RUN_DIR": str(root), "MRL_ATTEMPT": "1"}
        command = ["bash", root.parent / "job.sbatch", *words]
        environ["MRL_CPUS_PER_TASK"] = "1"
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=False)

    def replace(self, root: Path, mode: int, owner: int) -> None:
        root.rename(root.with_name("old"))
        self.fill(root)
        root.chmod(mode)
        os.chown(root, owner, owner)

    @pytest.mark.parametrize("words", [(), ("step", "train", "n1")], ids=["start", "step"])
    def test_the_runs_own_directory_is_used_whoever_may_write_in_it(self, run, words):
        """A user may open it to a group, or have given --trust."""
        for mode in (0o700, 0o2770):
            run.chmod(mode)
            done = self.start(run, *words)
            assert (done.stdout, done.stderr) == (f"{self.OURS}\n", "")

    @pytest.mark.parametrize("words", [(), ("step", "train", "n1")], ids=["start", "step"])
    @pytest.mark.parametrize("mode", [0o2770, 0o757])
    def test_another_that_others_can_write_is_refused_for_good(self, run, words, mode):
        """Theirs cannot be this user's, but they may move one of this user's there that they can write in."""
        self.replace(run, mode, os.geteuid())
        done = self.start(run, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1 and f"{run} is not the directory of this run" in done.stderr

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory another user's")
    @pytest.mark.parametrize("words", [(), ("step", "train", "n1")], ids=["start", "step"])
    def test_another_users_is_refused_for_good(self, run, words):
        self.replace(run, 0o755, 65534)
        done = self.start(run, *words)
        assert (done.returncode, done.stdout) == (2, "")
        assert "it was replaced by one of nobody, and nothing of it runs as you" in done.stderr

    def test_one_that_was_restored_from_a_backup_is_used(self, run):
        self.replace(run, 0o700, os.geteuid())
        assert self.start(run).stdout == f"{self.OURS}\n"


def test_a_harvested_replica_leaves_no_named_container_on_a_node_that_others_use(tmp_path):
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n')
    srun.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(render(a_job("qwen2.5-32b-dapo-partitioned", "harvest={partition: idle, max_replicas: 2}")))
    environ = {"MRL_RUN_DIR": str(tmp_path), "MRL_ATTEMPT": "3", "MRL_CPUS_PER_TASK": "1", "SLURM_JOB_ID": "7"}
    (tmp_path / "attempts" / "003").mkdir(parents=True)
    (tmp_path / "attempts" / "003" / "image").write_text("/i.sqsh\n")
    for step in ("harvest-4", "infer-0"):
        command = ["bash", "-p", script, "step", step, "n1"]
        subprocess.run(command, env={**environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, timeout=10, check=True)
    of_harvest, of_replica = (tmp_path / "asked").read_text().splitlines()
    assert "--container-image=/i.sqsh" in of_harvest and "--container-name" not in of_harvest
    assert "--container-name=mrl-7-3:no_exec" in of_replica


VLLM = ("inference={engine: vllm, max_batch: 64}", "placement.inference.tp=4", "sampling.top_p=1.0")
OWN_IMAGE = ("inference.vllm.image=vllm/vllm-openai:v0.32.0",)


def asked_of_srun(tmp_path: Path, script: str, *steps: str) -> list[list[str]]:
    """Arguments of srun in some steps of a script, on two nodes, with eight CPUs for each rank."""
    srun = tmp_path / "srun"
    srun.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >>{tmp_path}/asked; echo >>{tmp_path}/asked\n')
    srun.chmod(0o755)
    file = tmp_path / "job.sbatch"
    file.write_text(script)
    environ = {"MRL_RUN_DIR": str(tmp_path), "MRL_ATTEMPT": "3", "MRL_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "7"}
    (tmp_path / "attempts" / "003").mkdir(parents=True)
    (tmp_path / "attempts" / "003" / "image").write_text("/ranks.sqsh\n")
    (tmp_path / "attempts" / "003" / "image-infer").write_text("/vllm.sqsh\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    for step in steps:
        command = ["bash", "-p", file, "step", step, "n1,n2"]
        subprocess.run(command, env={**environ, "PATH": path}, timeout=10, check=True)
    return [line.split("\t")[:-1] for line in (tmp_path / "asked").read_text().splitlines()]


def test_a_replica_of_vllm_is_one_process_with_its_gpus_and_all_their_cpus(tmp_path):
    harvest = "harvest={partition: idle, max_replicas: 1}"
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, harvest))
    of_replica, of_harvest = asked_of_srun(tmp_path, script, "infer-3", "harvest-8")
    assert {"--ntasks=1", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=32"} <= {*of_replica}
    assert gpus_shown(of_replica) == "4,5,6,7"
    assert {"--ntasks=1", "--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=32"} <= {*of_harvest}
    for option in ("--ntasks-per-node=1", "--gpus-per-node=4", "--cpus-per-task=$((MRL_CPUS_PER_TASK * 4))"):
        assert f"--harvest-sbatch={option}" in script


def test_a_replica_of_vllm_over_two_nodes_is_a_step_with_one_process_on_each(tmp_path):
    large = ("placement.inference.tp=8", "placement.inference.pp=2")
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, *large))
    (asked,) = asked_of_srun(tmp_path, script, "infer-1")
    assert {"--nodes=2", "--nodelist=n1,n2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=64"} <= {*asked}
    assert {"--gpus-per-node=8", "--kill-on-bad-exit=1", "--overlap"} <= {*asked}
    assert gpus_shown(asked, "0,1,2,3,4,5,6,7") == "0,1,2,3,4,5,6,7"
    assert asked[-6:] == ["--run-dir", str(tmp_path), "--attempt", "3", "--replica", "1"]


def test_a_list_of_cpus_for_each_rank_does_not_bind_a_process_that_stands_for_several(tmp_path):
    on = profile(cpu_bind="map_ldom:0,0,1,1")
    train, infer = asked_of_srun(
        tmp_path, render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, on=on)), "train", "infer-0"
    )
    assert "--cpu-bind=map_ldom:0,0,1,1" in train
    assert not [option for option in infer if option.startswith("--cpu-bind")]


def test_replicas_of_vllm_have_the_image_and_python_that_the_recipe_gives_them(tmp_path):
    on = profile(python="/opt/ranks/bin/python")
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, *OWN_IMAGE, on=on))
    assert "--replica-image vllm/vllm-openai:v0.32.0" in script
    steps = ("train", "unpack", "unpack-infer", "infer-0")
    train, unpack, unpack_infer, infer = asked_of_srun(tmp_path, script, *steps)
    for asked in (train, unpack):
        assert {"--container-image=/ranks.sqsh", "--container-name=mrl-7-3:no_exec"} <= {*asked}
    for asked in (unpack_infer, infer):
        assert {"--container-image=/vllm.sqsh", "--container-name=mrl-7-3-infer:no_exec"} <= {*asked}
    assert [unpack[-1], unpack_infer[-1]] == [f"{tmp_path}/attempts/003/unpacked{of}" for of in ("", "-infer")]
    assert "/opt/ranks/bin/python" in train
    assert "python3" in infer, "that of its own image, where the path of the other means nothing"


def test_replicas_of_vllm_without_an_image_of_their_own_run_as_the_ranks_do(tmp_path):
    on = profile(python="/opt/ranks/bin/python")
    (infer,) = asked_of_srun(tmp_path, render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, on=on)), "infer-0")
    assert {"--container-image=/ranks.sqsh", "/opt/ranks/bin/python"} <= {*infer}
    (tmp_path / "other").mkdir()
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *VLLM, "inference.vllm.python=/opt/vllm/bin/python", on=on))
    (infer,) = asked_of_srun(tmp_path / "other", script, "infer-0")
    assert {"--container-image=/ranks.sqsh", "/opt/vllm/bin/python"} <= {*infer}


def test_a_vllm_beside_the_ranks_overlaps_them_on_its_share_of_their_gpus(tmp_path):
    script = render(a_job("qwen2.5-32b-dapo", *BESIDE))
    train, front, last = asked_of_srun(tmp_path, script, "train", "infer-3", "infer-15")
    assert {"--ntasks=64", "--gpus-per-node=8", "--container-image=/ranks.sqsh"} <= {*train}
    assert "--overlap" not in train
    assert {"--nodes=1", "--ntasks=1", "--gpus-per-node=8", "--overlap", "--container-image=/vllm.sqsh"} <= {*front}
    assert "--cpus-per-task=64" in front, "those of all ranks of the node, which wait while it generates"
    for asked, number in ((front, "3"), (last, "15")):
        assert gpus_shown(asked) == "4,5,6,7" and asked[-2:] == ["--replica", number]
    assert "--no-kill" not in script and "--outlives-nodes" not in script, "no node is there for replicas alone"


def test_the_vllms_beside_the_ranks_of_a_range_are_steps_of_one_node(tmp_path):
    script = render(a_job("qwen2.5-32b-dapo", *BESIDE, "job.nodes=4-8"))
    train, front = asked_of_srun(tmp_path, script, "train", "infer-3")
    assert {"--nodes=2", "--ntasks=16"} <= {*train}, "of the nodes that this start has"
    assert {"--nodes=1", "--ntasks=1"} <= {*front}


TAUGHT = (
    "distill={teacher: some/teacher, replicas: {nodes: 1, tp: 4}}",
    "job.nodes=9",
    "grpo.dynamic_sampling.enabled=false",
)


def test_replicas_of_the_teacher_are_steps_of_their_own_with_their_own_gpus(tmp_path):
    script = render(a_job("qwen2.5-32b-dapo", *TAUGHT))
    assert "--outlives-nodes" in script and "#SBATCH --no-kill" in script
    train, teacher = asked_of_srun(tmp_path, script, "train", "teacher-1")
    assert {"--ntasks=4", "--ntasks-per-node=4", "--overlap", "--job-name=teacher-1"} <= {*teacher}
    assert gpus_shown(teacher) == "4,5,6,7" and teacher[-2:] == ["--teacher", "1"]
    assert "--container-image=/ranks.sqsh" in teacher
    assert "--nodes=8" in train


def test_a_teacher_in_vllm_runs_in_the_image_with_vllm_and_the_other_replicas_do_not(tmp_path):
    own = (
        "inference.engine=native",
        "distill.replicas.engine=vllm",
        "distill.replicas.vllm.image=vllm/vllm-openai:v0.32.0",
    )
    script = render(a_job("qwen2.5-32b-dapo-partitioned", *TAUGHT, *own))
    assert "--replica-image vllm/vllm-openai:v0.32.0" in script
    infer, teacher = asked_of_srun(tmp_path, script, "infer-0", "teacher-0")
    assert "--container-image=/ranks.sqsh" in infer
    assert {"--container-image=/vllm.sqsh", "--ntasks=1", "--cpus-per-task=32"} <= {*teacher}


def test_replicas_of_the_reward_model_are_steps_in_the_image_with_vllm(tmp_path):
    reward = "reward={model: a/classifier, replicas: {nodes: 1, tp: 4, vllm: {image: 'vllm/vllm-openai:v0.32.0'}}}"
    judge = "environment={name: judge, args: {train: {path: a/set}, reward_model: {}}}"
    given = ("inference.engine=native", "job.nodes=9", "evaluation.every=0", "evaluation.sets={}", judge, reward)
    train, replica = asked_of_srun(tmp_path, render(a_job("qwen2.5-32b-dapo", *given)), "train", "reward-1")
    assert "--container-image=/ranks.sqsh" in train and "--nodes=8" in train
    assert {"--container-image=/vllm.sqsh", "--ntasks=1", "--job-name=reward-1"} <= {*replica}
    assert gpus_shown(replica) == "4,5,6,7" and replica[-2:] == ["--reward", "1"]


def test_pyxis_is_left_to_mount_the_image_where_the_profile_says_so():
    script = render(a_job("qwen2.5-32b-dapo", on=profile(container=Container(image="a:b", named=False))))
    assert "--meet-s 1800" in script, "each node unpacks its own before the check can begin"
    assert "unpack" not in script
    assert "--container-name" not in script


class TestForget:
    """Containers that are removed from a node before the steps of an attempt."""

    THERE = ("pyxis_7.0", "pyxis_7.12", "pyxis_7_7.3", "pyxis_7_mrl-7-002", "pyxis_mrl-7-001", "pyxis_mrl-5-003")
    THERE += ("pyxis_mrl-7-001-infer",)
    OTHERS = ("pyxis_77.0", "pyxis_17.0", "pyxis_7", "mrl-7-001", "pyxis_mine", "pyxis_8_8.0")
    OTHERS += ("pyxis_mrl-dev", "pyxis_mrl-7-001-mine", "pyxis_mrl-", "pyxis_7_mine", "pyxis_7.mine", "pyxis_7x0")

    def forget(self, tmp_path: Path, there: tuple[str, ...], listed: int = 0) -> tuple[list[str], int]:
        """Containers that the step removes, and its exit code. The submitting shell has settings of the user's.

        listed: exit code of `enroot list`.
        """
        tools = tmp_path / "bin"
        tools.mkdir()
        names = "".join(f"echo {name}; " for name in there)
        elsewhere = "[ -z ${ENROOT_DATA_PATH:-} ] || exit 0"  # where pyxis has never unpacked anything
        enroot = (
            f'#!/bin/sh\n{elsewhere}\n[ "$1" = list ] && {{ {names}exit {listed}; }}\necho "$*" >>{tmp_path}/removed\n'
        )
        for name, text in {
            "enroot": enroot,
            "srun": '#!/bin/sh\nuntil [ "$1" = env ]; do shift; done\nexec "$@"\n',
        }.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        script = tmp_path / "job.sbatch"
        script.write_text(render(a_job("demo")))
        environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "MRL_ATTEMPT": "3"}
        environ |= {"MRL_RUN_DIR": str(tmp_path), "MRL_CPUS_PER_TASK": "1", "ENROOT_DATA_PATH": "/scratch/me"}
        (tmp_path / "attempts" / "003").mkdir(parents=True)
        (tmp_path / "attempts" / "003" / "image").write_text("/i.sqsh\n")
        ended = subprocess.run(["bash", script, "step", "forget", "node01"], env=environ, timeout=60, check=False)
        removed = tmp_path / "removed"
        return (removed.read_text().split() if removed.exists() else []), ended.returncode

    def test_this_jobs_containers_go_and_so_do_those_of_other_jobs_of_ours(self, tmp_path):
        """A requeue keeps the numbers of job and step, by which pyxis calls an unnamed one."""
        assert self.forget(tmp_path, self.THERE + self.OTHERS) == (["remove", "--force", *self.THERE], 0)

    def test_nothing_else_does(self, tmp_path):
        assert self.forget(tmp_path, self.OTHERS) == ([], 0)

    def test_a_node_that_cannot_list_its_containers_is_not_clean(self, tmp_path):
        assert self.forget(tmp_path, self.THERE, listed=3) == ([], 3)


class TestEnvironmentOfSteps:
    """Environment of srun, whatever shell submitted the job."""

    def of_srun(self, tmp_path: Path, **changes: str) -> dict[str, str]:
        srun = tmp_path / "srun"
        srun.write_text(f"#!/bin/sh\nenv -0 >{tmp_path}/environ\n")
        srun.chmod(0o755)
        script = tmp_path / "job.sbatch"
        script.write_text(render(a_job("demo", on=profile("plain"))))
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        ours = {"MRL_RUN_DIR": str(tmp_path), "MRL_ATTEMPT": "3", "MRL_CPUS_PER_TASK": "4"}
        environ = {**clean, **ours, "PATH": f"{tmp_path}:{os.environ['PATH']}", **changes}
        command = ["bash", "-p", script, "step", "train", "n1,n2"]
        subprocess.run(command, env=environ, timeout=10, check=True, capture_output=True)
        pairs = (line.partition("=") for line in (tmp_path / "environ").read_text().split("\0"))
        return {name: value for name, _, value in pairs}

    @pytest.mark.parametrize(
        "name",
        [
            *("SLURM_TIMELIMIT", "SLURM_EXIT_ERROR", "SLURM_NTASKS", "SLURM_DISTRIBUTION", "SLURM_MEM_PER_CPU"),
            *("SLURM_UNBUFFEREDIO", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_OVERLAP", "SLURM_PROLOG"),
            *("SRUN_EXPORT_ENV", "SRUN_OUTPUT", "PYXIS_CONTAINER_NAME", "_SLURM_SPANK_OPTION_pyxis_container_image"),
            *("SLURM_OF_A_LATER_VERSION", "SLURMD_DEBUG", "BASH_ENV"),
        ],
    )
    def test_it_obeys_no_shell(self, tmp_path: Path, name: str) -> None:
        assert name not in self.of_srun(tmp_path, **{name: "1"})

    @pytest.mark.parametrize(
        "name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CONF", "SLURM_MEM_PER_NODE", "SLURM_HINT", "SLURM_JWT"]
    )
    def test_it_finds_the_job_and_its_memory(self, tmp_path: Path, name: str) -> None:
        assert self.of_srun(tmp_path, **{name: "1"})[name] == "1"

    def test_the_ranks_get_the_whole_environment_and_their_cpus(self, tmp_path: Path) -> None:
        found = self.of_srun(tmp_path, SLURM_EXPORT_ENV="NONE", SLURM_CPUS_PER_TASK="1", MRL_OVERLAP="1")
        assert found["SLURM_EXPORT_ENV"] == "ALL"
        assert found["SRUN_CPUS_PER_TASK"] == found["SLURM_CPUS_PER_TASK"] == "4"
        assert found["SLURM_OVERLAP"] == "1"


def test_slurm_shows_an_evaluation_as_what_it_is():
    job = a_job()
    config = job.recipe.config
    asked = Evaluation(checkpoint="/shared/runs/other", environment=config.task, sampling=config.sampling)
    script = render(replace(job, recipe=replace(job.recipe, evaluation=asked)))
    assert "--job-name=evaluate" in script and "--job-name=train" not in script
    assert "--job-name=train" in render(job)


def test_the_options_of_a_harvested_replicas_job_reach_the_host_side_word_for_word():
    odd = "--comment=it's $HOME `id` 100% ;"
    harvest = f'harvest={{partition: idle, max_replicas: 2, sbatch: ["{odd}"]}}'
    script = render(a_job("qwen2.5-32b-dapo-partitioned", harvest))
    (start,) = re.findall(r'-c "\$start" run .*?\n(.*?)\n +elsewhere', script, re.DOTALL)
    shown = subprocess.run(["bash", "-c", f'printf "%s\\0" {start}'], capture_output=True, text=True, check=True).stdout
    words = shown.split("\0")
    assert words[words.index("--harvest") + 1] == "2"
    assert {"--harvest-sbatch=--partition=idle", f"--harvest-sbatch={odd}"} <= {*words}
