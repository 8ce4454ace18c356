"""The doctor checks Slurm, containers, Python and accounting, and shows no secret."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
from doctor_helpers import config, disk, facts, found, profile, recipe, said, slurm

from launcher.backends.probe.command import CommandAnswer
from launcher.backends.probe.node import SCRIPT, NodeFacts
from launcher.backends.probe.node import _read as read_facts
from launcher.backends.probe.rank import RankFacts
from launcher.doctor.examine import examine

BOX = {"container": {"image": "nvcr.io#nvidia/pytorch:25.06-py3"}}
NODE = NodeFacts(host="node03", python="3.9.21", interpreter="python3", shared=True, enroot="3.5.0", driver="570.86")


def shown(topic: str, cluster="25.05", values=None, **changes) -> str:
    findings = examine(facts(cluster, **changes), recipe(), profile(**(BOX if values is None else values)))
    return said([one for one in findings if one.topic == topic])


NO_CONTROLLER = CommandAnswer(failure="scontrol did not answer within 20 s")
BROKEN = CommandAnswer(failure="sinfo: fatal: Could not establish a configuration source")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "ok: 22.05.8, cluster lab"),
        ({"config": CommandAnswer(config("22.05-partition", SLURM_VERSION="20.02.7"))}, "error: 20.02.7 is too old"),
        ({"config": NO_CONTROLLER}, "error: its controller does not answer: scontrol did not answer within 20 s"),
        ({"version": BROKEN, "config": BROKEN}, f"error: its commands are installed but do not work: {BROKEN.failure}"),
    ],
)
def test_the_state_of_slurm(changes, said):
    assert shown("slurm", replace(slurm("22.05-partition"), **changes)).startswith(said)


def test_no_slurm_here():
    nothing = CommandAnswer(failure="no sinfo here (No such file or directory)", there=False)
    missing = replace(slurm("22.05-partition"), version=nothing, config=nothing)
    findings = examine(facts(missing), recipe(), profile())
    assert (findings[0].level, findings[0].topic) == ("error", "slurm")
    assert "no sinfo here" in findings[0].text
    assert not [one for one in findings if one.topic in ("partition", "preemption", "limits")]
    assert [one for one in findings if one.topic == "run root"]


def test_containers_need_pyxis_with_its_options():
    without = "error: srun has no option --container-image here, and demo needs nvcr.io#"
    assert without in shown("pyxis", "22.05-partition")
    assert "lacks --container-env" in shown("pyxis", "23.11")
    assert shown("pyxis") == "ok: srun has its options"
    assert shown("containers", values={}) == "ok: none: the ranks run on the nodes as they are"
    assert shown("pyxis", values={}) == ""


def test_the_python_of_the_host_side_here():
    assert shown("python").startswith("ok: python3 is 3.9.2 on this machine")
    assert "error: python3 is 3.6.8" in shown("python", host_python=CommandAnswer("3.6.8\n"))
    absent = CommandAnswer(failure="no python3 here (No such file or directory)")
    assert shown("python", host_python=absent).startswith("error: no python3 here")
    assert shown("python", host_python=absent, values={"prolog": ["module load python"]}).startswith("note:")


def test_the_python_of_the_host_side_on_a_node_takes_precedence():
    assert shown("python", node=NODE).startswith("ok: python3 is 3.9.21 on node03")
    missing = replace(NODE, python=None, interpreter="")
    assert shown("python", node=missing).startswith("error: python3 on node03: not found")
    assert shown("python", node=replace(NODE, python="3.5.3")).startswith("error: python3 on node03: 3.5.3")


def test_the_compute_node():
    assert shown("compute node", node=NODE) == "ok: a step ran on node03, NVIDIA driver 570.86"
    assert shown("enroot", node=NODE) == "ok: 3.5.0 on node03"
    assert "error: not found on node03" in shown("enroot", node=replace(NODE, enroot=None))
    assert "it has no nvidia-smi" in shown("compute node", node=replace(NODE, driver=None))


def test_a_node_whose_gpus_admit_one_process_is_an_error_where_vllm_and_the_ranks_share_them():
    node = replace(NODE, compute_mode="Exclusive_Process")
    for engine, errors in (("vllm", 1), ("native", 0)):
        asked = recipe(f"inference.engine={engine}", "placement.mode=colocated")
        found = [one for one in examine(facts("25.05", node=node), asked, profile(**BOX)) if one.topic == "gpus"]
        assert said(found).count("error: a GPU is in compute mode Exclusive_Process") == errors


def test_the_step_on_a_compute_node_asks_for_the_modes_of_its_gpus(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\ncase $1 in *driver*) echo 570.86 ;; *mode*) echo Default; echo Prohibited ;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", str(tool), "", "false"], capture_output=True, text=True, check=True
    )
    found = read_facts(answer.stdout)
    assert (found.driver, found.compute_mode, found.shared) == ("570.86", "Prohibited", True)


def test_a_compute_node_that_cannot_be_tested_is_a_warning():
    busy = NodeFacts(failure="srun: error: Unable to allocate resources: Requested nodes are busy")
    assert shown("compute node", node=busy).startswith("warning: none could be tested: srun: error:")
    assert shown("python", node=busy).startswith("ok: python3 is 3.9.2 on this machine")


def test_accounting():
    assert shown("accounting", "22.05-qos") == "ok: sacct works, so mrl status knows jobs that have ended"
    without = shown("accounting", "22.05-partition")
    assert without.startswith("note: sacct does not work here (Slurm accounting storage is disabled)")
    assert "10 min after its end (MinJobAge)" in without


def test_secrets_are_named_and_never_shown(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    values = {"secrets": ["WANDB_API_KEY", "HF_TOKEN"]}
    assert "the job will not have them: HF_TOKEN" in shown("secrets", values=values, missing_secrets=("HF_TOKEN",))
    assert shown("secrets", values=values) == "ok: set: WANDB_API_KEY, HF_TOKEN"
    assert "hunter2" not in repr(examine(facts("25.05"), recipe(), profile(**values)))


def test_a_refusal_of_mrl_submit_is_an_error():
    assert shown("recipe", refusals=("placement.training.tp 3 does not divide",)).startswith("error: placement")


@pytest.mark.parametrize(
    ("changes", "node", "level", "words"),
    [
        ({}, None, [], ""),
        ({"file_system": "ext4"}, None, ["note"], "usually local to one machine"),
        ({"file_system": "ext4"}, NODE, ["ok"], "is seen on node03"),
        ({}, replace(NODE, shared=False), ["error"], "/shared/mrl is not shared"),
    ],
)
def test_whether_the_run_root_is_shared(changes, node, level, words):
    findings = examine(facts("25.05", run_root=disk(**changes), node=node), recipe(), profile())
    seen = [one for one in findings if one.topic == "run root"][1:]
    assert [one.level for one in seen] == level
    assert words in said(seen)


def test_without_a_recipe_one_node_with_all_its_gpus_is_checked():
    assert "1 node with 8 GPUs needed" in said(found("22.05-partition", "nodes"))
    assert "a run can be preempted" in said(found("22.05-partition", "preemption"))


def test_a_rank_in_the_container_reports_its_findings():
    worked = RankFacts(versions="torch 2.8, megatron-core 0.16.1", gpus=1, cpus="0,1")
    assert shown("container", rank=worked) == (
        "ok: a rank in it communicates and writes to run_root: torch 2.8, megatron-core 0.16.1, 1 GPU, CPUs 0,1"
    )
    assert shown("container", rank=replace(worked, gpus=0)).startswith("error: torch 2.8")
    assert shown("container", rank=RankFacts(failure="boom")) == "error: a rank in it failed: boom"
    assert shown("container", rank=RankFacts(unasked="x")).startswith("note: not started")


def test_packages_that_its_gpu_lacks_are_named_with_a_release_and_slow_the_run_down():
    rank = RankFacts(
        packages=((True, "torch 2.8 accepts all calls"), (False, "flash-attn is not installed: install it"))
    )
    assert shown("kernels", rank=rank).splitlines() == [
        "ok: torch 2.8 accepts all calls",
        "warning: flash-attn is not installed: install it",
    ]


@pytest.mark.parametrize(("capability", "errors"), [((8, 0), 1), ((9, 0), 0)])
def test_fp8_is_refused_on_a_gpu_without_it(capability, errors):
    asked = recipe("training.fp8=hybrid", "model.dtype=bf16", "job.device=cuda")
    findings = examine(facts("25.05", rank=RankFacts(capability=capability)), asked, profile(**BOX))
    texts = [one.text for one in findings if one.topic == "kernels"]
    assert len(texts) == errors
    assert all(text.startswith("training.fp8 is hybrid, but its GPU has compute capability 8.0") for text in texts)
