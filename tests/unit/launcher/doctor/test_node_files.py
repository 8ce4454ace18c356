"""Files of a recipe are refused if the nodes cannot see them, and mounted into containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.cluster.profile import Profile
from launcher.doctor import node_files
from launcher.doctor.node_files import on_nodes, run_directory, to_mount
from launcher.doctor.preflight import Packages, absent_files, collect_local, findings
from launcher.recipe.load import Recipe, load_recipe
from megatron_rl.recipe.vllm_releases import TRIED

WEIGHTS = (
    "{num_layers: 1, hidden_size: 16, ffn_hidden_size: 16, num_attention_heads: 2, num_query_groups: 1, "
    "max_position_embeddings: 64, init: checkpoint, checkpoint: CHECKPOINT}"
)
IMAGE = "/images/ranks.sqsh"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that all nodes see, with a run root in it. Its folder `own` is local to each machine."""
    for name in ("root", "data", "own", "shared/code"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(node_files, "OF_ONE_MACHINE", (str(tmp_path / "own"),))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def profile(shared: Path, *mounts: str, image: str | None = IMAGE) -> Profile:
    container = {"image": image, "mounts": [*mounts]} if image else None
    return Profile.model_validate({"gpus_per_node": 8, "run_root": f"{shared}/root", "container": container})


def recipe(data: Path | str, *overrides: str) -> Recipe:
    environment = f"environment={{name: math, args: {{train: {{path: '{data}'}}}}}}"
    return load_recipe("demo", [environment, *overrides])


def refused(asked: Recipe, on: Profile) -> list[str]:
    return [one.text for one in on_nodes(asked, on) if one.level == "error"]


def test_a_missing_file_and_one_that_only_this_machine_has(shared):
    (shared / "own" / "train.jsonl").touch()
    (shared / "data" / "link.jsonl").symlink_to(shared / "own" / "train.jsonl")
    on = profile(shared)
    (said,) = refused(recipe(shared / "data" / "none.jsonl"), on)
    assert said.startswith("override ") and said.endswith("none.jsonl: no such file or directory")
    for name in ("own/train.jsonl", "data/link.jsonl"):
        (said,) = refused(recipe(shared / name), on)
        assert f"{shared}/own is local to each machine, and the nodes do not see it" in said
    (shared / "own" / "root").mkdir()
    assert not refused(recipe(shared / "own/train.jsonl"), on.model_copy(update={"run_root": f"{shared}/own/root"}))


def test_vllm_is_looked_for_in_the_python_of_the_nodes_unless_that_is_in_a_container(shared):
    vllm = ("placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1", "inference.engine=vllm")
    vllm += ("resume.partial=keep", "model.num_attention_heads=2", "model.num_query_groups=2")
    (shared / "data" / "train.jsonl").touch()
    asked = recipe(shared / "data" / "train.jsonl", *vllm, f"inference.vllm.python={shared}/python")
    (said,) = refused(asked, profile(shared, image=None))
    assert said.startswith(f"{shared}/python on this machine, which is to run vLLM, does not start")
    assert not refused(asked, profile(shared))


def test_a_run_directory_that_only_this_machine_has(shared):
    (said,) = run_directory(shared / "own" / "run", profile(shared))
    assert (said.level, "is local to each machine" in said.text) == ("error", True)
    assert not [*run_directory(shared / "elsewhere" / "run", profile(shared))]


def test_a_local_disk_is_refused_if_the_run_root_is_on_the_network(shared, monkeypatch):
    (shared / "data" / "train.jsonl").touch()
    kinds = {"data": "ext4", "root": "lustre"}
    monkeypatch.setattr(node_files, "file_system", lambda path: kinds[path.relative_to(shared).parts[0]])
    (said,) = refused(recipe(shared / "data" / "train.jsonl"), profile(shared))
    assert "its file system (ext4) is local to this machine" in said
    kinds["root"] = "ext4"  # a login node that serves its disk to the nodes
    assert not refused(recipe(shared / "data" / "train.jsonl"), profile(shared))


def test_a_path_in_the_container_is_looked_up_behind_its_mount(shared):
    (shared / "data" / "train.jsonl").touch()
    on = profile(shared, f"{shared}/data:/inside:ro")
    assert not refused(recipe("/inside/train.jsonl"), on)
    assert to_mount(recipe("/inside/train.jsonl"), on, shared / "root/runs/a") == (shared / "root",)
    assert refused(recipe("/inside/other.jsonl"), on)


def test_the_container_sees_what_the_recipe_names(shared):
    run = shared / "others" / "runs" / "a"
    checkpoint = run / "checkpoints" / "step-000040"
    checkpoint.mkdir(parents=True)
    (run / "resolved.yaml").touch()
    snapshot, blobs = shared / "hub" / "snapshots" / "abc", shared / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/123")
    (shared / "data" / "train.jsonl").touch()
    asked = recipe(
        shared / "data" / "train.jsonl",
        f"model={WEIGHTS.replace('CHECKPOINT', str(checkpoint))}",
        f"tokenizer={{type: huggingface, path: '{snapshot}'}}",
        "code.include=[shared/code]",
        f"image.reference={IMAGE}",
    )
    found = to_mount(asked, profile(shared), shared / "elsewhere" / "run")
    assert found == (
        shared / "root",
        shared / "elsewhere" / "run",
        run,
        snapshot,
        blobs,
        shared / "data" / "train.jsonl",
    )
    below = profile(shared).model_copy(update={"run_root": str(shared)})
    assert to_mount(asked, below, shared / "root" / "run") == (shared,)
    assert to_mount(asked, profile(shared, image=None), shared / "root" / "run") == ()


def test_the_folder_of_a_future_file_is_mounted(shared, monkeypatch):
    monkeypatch.setenv("HOME", str(shared / "data"))
    remote = "environment={name: remote, args: {url: 'http://a:1', token_file: ~/mrl/token}}"
    asked = load_recipe("demo", [remote])
    assert not refused(asked, profile(shared))
    assert to_mount(asked, profile(shared), shared / "root/run") == (shared / "root", shared / "data")
    in_memory = load_recipe("demo", [remote.replace("~/mrl/token", "/dev/shm/token")])
    assert to_mount(in_memory, profile(shared), shared / "root/run") == (shared / "root",)


def test_a_path_that_pyxis_would_split_in_two(shared):
    (shared / "data" / "a,b").mkdir()
    (said,) = refused(recipe(shared / "data" / "a,b"), profile(shared))
    assert "comma" in said
    assert not refused(recipe(shared / "data" / "a,b"), profile(shared, image=None))


def test_ranks_without_a_container_lack_the_packages_that_this_python_lacks(shared, monkeypatch):
    asked = load_recipe("smollm2-135m-chain-sum")
    monkeypatch.setattr(node_files, "missing_packages", lambda config: Packages(("gguf",), "pip install it"))
    (said,) = refused(asked, profile(shared, image=None))
    assert said.startswith("not installed: gguf; the ranks use this Python")
    assert not refused(asked, profile(shared))
    assert not refused(asked, profile(shared, image=None).model_copy(update={"python": "/opt/bin/python"}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission(shared):
    (shared / "data" / "train.jsonl").touch(mode=0)
    (said,) = refused(recipe(shared / "data" / "train.jsonl"), profile(shared))
    assert said.endswith("you may not read it")


def test_a_run_that_began_from_a_checkpoint_resumes_without_it(shared):
    weights = f"model={WEIGHTS.replace('CHECKPOINT', f'{shared}/gone')}"
    (shared / "data" / "train.jsonl").touch()
    asked, on = recipe(shared / "data" / "train.jsonl", weights), profile(shared)
    assert "model.checkpoint" in refused(asked, on)[0]
    assert not on_nodes(asked, on, resumes=True)
    assert not [*absent_files(asked, resumes=True)] and [*absent_files(asked)]
    penalised = recipe(shared / "data" / "train.jsonl", weights, "grpo.kl_beta=0.1")
    assert [*absent_files(penalised, resumes=True)]


VLLM = """#!/bin/sh
case "$*" in
    *mrl.vllm_options*) echo 'mrl.vllm_options={"nonsense": "unrecognized arguments: --nonsense=3"}' ;;
    *) echo 'mrl.vllm={"release": [3, 12], "version": "%s", "torch": "2", "torchvision": null, "lacking": [],' \
        '"nccl": null}' ;;
esac
"""


def test_options_that_vllm_refuses_are_errors_with_their_key(shared):
    (shared / "python").write_text(VLLM % TRIED[-1])
    (shared / "python").chmod(0o755)
    (shared / "data" / "train.jsonl").touch()
    vllm = ("placement.mode=partitioned", "job.nodes=2", "placement.inference.nodes=1", "inference.engine=vllm")
    vllm += ("resume.partial=keep", "model.num_attention_heads=2", "model.num_query_groups=2")
    vllm += (f"inference.vllm.python={shared}/python", "inference.vllm.args={nonsense: 3}")
    asked = recipe(shared / "data" / "train.jsonl", *vllm)
    (said,) = refused(asked, profile(shared, image=None))
    assert said == "inference.vllm.args.nonsense: vLLM refuses it: unrecognized arguments: --nonsense=3"
    assert said in [one.text for one in findings(collect_local(asked), asked.config) if one.level == "error"]
