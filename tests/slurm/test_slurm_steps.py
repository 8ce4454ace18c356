"""The script's steps: who runs where, in which container, for the shipped 64-GPU recipes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from lab import wait_until
from login import SECONDS, Login, Run
from together import Together

together = Together()


def run_script_of(login: Login, *words: str | Path, stub: dict | None = None) -> Run:
    """Submit the script alone, since mrl-submit would refuse an image or weights that do not exist."""
    root = login.share / "run"
    login.share.mkdir(exist_ok=True)
    script = login.prepare(*words, "--cluster", "pods", "--run-dir", root)
    return login.adopt(root, login.sbatch(script, stub=stub))


@together
def test_qwen_32b_runs_16_ranks_in_containers_on_8_nodes(login: Login) -> None:
    runs_in_containers_on_8_nodes(login, 2, "job.gpus_per_node=2", "placement.training.tp=2")


@pytest.mark.slow
def test_qwen_32b_as_it_is_runs_64_ranks_in_containers_on_8_nodes(login: Login) -> None:
    runs_in_containers_on_8_nodes(login, 8)


def runs_in_containers_on_8_nodes(login: Login, gpus: int, *changes: str) -> None:
    login.confine(1, 8)
    run = run_script_of(login, "qwen2.5-32b-dapo", *changes)
    assert run.wait(limit=200) == "COMPLETED", run.log()
    assert run.ends() == [("finished", None)]

    ranks = [seen for name, seen in run.seen().items() if name.startswith("train.")]
    hosts = [rank["host"] for rank in ranks]
    assert len(set(hosts)) == 8
    assert {hosts.count(host) for host in hosts} == {gpus}
    for rank in ranks:
        environment = rank["environment"]
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, range(gpus)))  # peers stay visible to NCCL
        assert environment["HF_HOME"] == f"{login.share}/cache/huggingface"  # not the image's
        assert environment["MRL_STEP"] == "train"
        assert "LANG" not in environment

    steps = [step for step in login.lab.containers() if str(step["job"]) == run.job]
    assert {step["image"] for step in steps} == {str(login.image)}
    for step in steps:
        assert step["mount_home"] == "false"
        assert step["name"] == f"mrl-{run.job}-1:no_exec"  # unpacked once, and never one of an earlier attempt
        assert "writable" not in step
        mounts = [mount.split(":")[:2] for mount in step["mounts"].split(",")]
        assert any(source == target and run.dir.root.is_relative_to(source) for source, target in mounts)
    assert len({step["step"] for step in steps}) == 3  # unpack, fabric, train
    for number in {step["step"] for step in steps}:
        assert len([step for step in steps if step["step"] == number]) == 8


@pytest.mark.slow
@together
def test_each_replica_of_a_partitioned_run_has_a_step_of_its_own(login: Login) -> None:
    login.confine(1, 8)
    layout = ("placement.mode=partitioned", "job.nodes=5", "job.gpus_per_node=2", "placement.inference.nodes=3")
    layout += ("placement.inference.tp=2",)
    stub = {"steps": 100_000, "seconds": 0.1, "until": "enough", "replica_dies": 1}
    run = run_script_of(login, "demo", *layout, stub=stub)
    finish_after_starts(run, {"infer-0.0": "0", "infer-1.0": "1", "infer-2.0": "0"})
    seen = run.seen()
    hosts = {
        step: {rank["host"] for name, rank in seen.items() if name.rpartition(".")[0] == step}
        for step in ("train", "infer-0", "infer-1", "infer-2")
    }
    assert {step: len(nodes) for step, nodes in hosts.items()} == {"train": 2, "infer-0": 1, "infer-1": 1, "infer-2": 1}
    assert len(set.union(*hosts.values())) == 5
    assert {rank["replica"] for name, rank in seen.items() if name.startswith("infer-2.")} == {2}
    assert re.search(
        r"infer-1 rank [01] on \S+: it was killed by SIGKILL.*; it starts again", run.dir.batch_log.read_text()
    )
    token = run.dir.token
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text().strip() not in run.dir.batch_log.read_text() + run.dir.script.read_text()
    assert run.ends() == [("finished", None)]  # the trainer did not notice
    assert {line["attempt"] for line in run.metrics()} == {1}
    assert run.has_each_step_once()


def finish_after_starts(run: Run, starts: dict[str, str]) -> None:
    """Let the run train until these ranks of replicas have started so many times, and wait for its end."""

    def started() -> bool:
        seen = run.seen()
        return all(rank in seen and seen[rank]["environment"]["MRL_START"] == start for rank, start in starts.items())

    wait_until("the replicas have started", started, SECONDS)
    (run.dir.root / "enough").touch()
    assert run.wait(limit=200) == "COMPLETED", run.log()


@pytest.mark.slow
@together
def test_replicas_that_start_their_workers_are_one_process_in_an_image_of_their_own(login: Login) -> None:
    """The stub rank stands for the Python that has vLLM."""
    login.confine(1, 8)
    image = login.home / "vllm.sqsh"
    shutil.copyfile(login.image, image)
    layout = ("job.nodes=2", "job.spare_nodes=0", "placement.inference.nodes=1", "placement.inference.tp=4")
    python = login.profiles["pods"]["python"]
    vllm = ("inference.engine=vllm", f"inference.vllm.image={image}", f"inference.vllm.python={python}")
    stub = {"steps": 100_000, "seconds": 0.1, "until": "enough"}
    run = run_script_of(login, "qwen2.5-32b-dapo-partitioned", *layout, *vllm, stub=stub)
    finish_after_starts(run, {"infer-0.0": "0", "infer-1.0": "0"})
    assert run.ends() == [("finished", None)]

    seen = run.seen()
    assert sorted(name for name in seen if name.startswith("infer-")) == ["infer-0.0", "infer-1.0"]
    first, second = seen["infer-0.0"], seen["infer-1.0"]
    assert first["host"] == second["host"] != seen["train.0"]["host"]
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in (first, second)] == ["0,1,2,3", "4,5,6,7"]
    cpus = [int(each["environment"]["SLURM_CPUS_PER_TASK"]) for each in (seen["train.0"], first)]
    assert cpus[1] == 4 * cpus[0]

    steps = [step for step in login.lab.containers() if str(step["job"]) == run.job]
    images = {step["name"]: step["image"] for step in steps}
    ours = f"mrl-{run.job}-1"
    assert images == {f"{ours}:no_exec": str(login.image), f"{ours}-infer:no_exec": str(image)}


@pytest.mark.slow
@together
def test_vllms_beside_the_ranks_are_on_their_nodes_and_gpus_at_the_same_time(login: Login) -> None:
    login.confine(1, 8)
    image = login.home / "beside.sqsh"
    shutil.copyfile(login.image, image)
    layout = ("job.nodes=2", "job.gpus_per_node=4", "placement.training.tp=4", "placement.inference.tp=2")
    python = login.profiles["pods"]["python"]
    vllm = ("inference.engine=vllm", f"inference.vllm.image={image}", f"inference.vllm.python={python}")
    stub = {"steps": 100_000, "seconds": 0.1, "until": "enough", "replica_dies": 1}
    run = run_script_of(login, "qwen2.5-32b-dapo", *layout, *vllm, stub=stub)
    finish_after_starts(run, {f"infer-{number}.0": str(int(number == 1)) for number in range(4)})
    assert run.ends() == [("finished", None)]
    assert {line["attempt"] for line in run.metrics()} == {1}, "the training went on beside them"

    seen = run.seen()
    fronts = [seen[f"infer-{number}.0"] for number in range(4)]
    assert [front["host"] for front in fronts] == [seen[f"train.{rank}"]["host"] for rank in (0, 2, 4, 6)]
    assert [front["environment"]["CUDA_VISIBLE_DEVICES"] for front in fronts] == ["0,1", "2,3"] * 2
    assert seen["train.0"]["environment"]["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    cpus = {int(each["environment"]["SLURM_CPUS_PER_TASK"]) for each in fronts}
    assert cpus == {4 * int(seen["train.0"]["environment"]["SLURM_CPUS_PER_TASK"])}

    steps = [step for step in login.lab.containers() if str(step["job"]) == run.job]
    ours = f"mrl-{run.job}-1"
    assert {step["name"]: step["image"] for step in steps} == {
        f"{ours}:no_exec": str(login.image),
        f"{ours}-infer:no_exec": str(image),
    }


@together
def test_node_with_a_missing_gpu_is_replaced_by_the_spare_node(login: Login) -> None:
    login.lab.run("srun", "--nodelist=node09", "mv", "/dev/nvidia3", "/dev/broken3")
    try:
        sizes = ("job.nodes=2", "job.spare_nodes=1", "job.device=cuda", "job.gpus_per_node=8")
        login.confine(8, 10)
        run = run_script_of(login, "demo", *sizes)
        assert run.wait(limit=200) == "COMPLETED", run.log()
        assert {rank["host"] for name, rank in run.seen().items() if name.startswith("train.")} == {"node08", "node10"}
        assert "node node09 is not used" in run.dir.batch_log.read_text()
    finally:
        login.lab.run("srun", "--nodelist=node09", "mv", "/dev/broken3", "/dev/nvidia3")


@together
def test_missing_image_fails_before_the_ranks_start(login: Login) -> None:
    login.confine(1, 8)
    login.profiles["pods"]["container"]["image"] = str(login.home / "none.sqsh")
    run = run_script_of(login, "demo", "job.nodes=1", "job.backoff_s=1")
    assert run.wait() == "FAILED"
    assert "none.sqsh" in run.dir.batch_log.read_text()
    assert not run.seen()
